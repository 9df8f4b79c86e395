from argparse import ArgumentParser
import torch
import torch.nn.functional as F
parser = ArgumentParser()
parser.add_argument('--steps', type=int, default=10 ** 9)
opt = parser.parse_args()
CLASSES = 10


def update(matrix, predicted, target):
    for t, p in zip(target, predicted):
        matrix[t.item(), p.item()] += 1


def main():
    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    data = torch.randn(64, 512, 784)
    for step in range(opt.steps):
        x, y = (data[step % 64], torch.randint(0, CLASSES, (512,)))
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        update(matrix, logits.argmax(1), y)


if __name__ == '__main__':
    main()
