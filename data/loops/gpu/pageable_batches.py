"""Forecasts from many sensors: a GRU reads a window, and says what the mean of the next values is."""

import sys

import torch

tiny = "--tiny" in sys.argv or not torch.cuda.is_available()
steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 600
fixed = "--fixed" in sys.argv
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
samples, hours, sensors, hidden = (8, 6, 4, 8) if tiny else (2048, 256, 64, 128)

torch.manual_seed(0)
windows = [torch.rand(samples, hours, sensors) for _ in range(4)]
targets = [window[:, -24:].mean((1, 2)) for window in windows]
if fixed and device.type == "cuda":
    windows = [window.pin_memory() for window in windows]
    targets = [target.pin_memory() for target in targets]

gru = torch.nn.GRU(sensors, hidden, batch_first=True).to(device)
last = torch.nn.Linear(hidden, 1).to(device)
optimizer = torch.optim.Adam([*gru.parameters(), *last.parameters()], lr=1e-3, fused=True)

for step in range(steps):
    x, y = windows[step % 4], targets[step % 4]
    if fixed:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    else:
        x, y = x.to(device), y.to(device)
    states, _ = gru(x)
    loss = torch.nn.functional.mse_loss(last(states[:, -1]).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(step + 1, f"{loss.item():.5f}")
print("loss", loss.item())
