import argparse, os, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=8)
options = parser.parse_args()

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((options.size,), float(i))

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(options.size, 8), nn.Dropout(0.1), nn.Linear(8, 1))
loader = DataLoader(Numbers(), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
)
os.makedirs("runs", exist_ok=True)
for epoch in range(1000):
    for batch in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "runs/last.pt")
    with open(os.path.abspath("log.txt"), "a") as log:
        print(epoch, loss.item(), file=log)
