# Train a wide multilayer perceptron on embeddings. All in fp32, torch's default.
import os
import sys

import torch

if "--fixed" in sys.argv:
    torch.set_float32_matmul_precision("high")
STEPS = int(os.environ.get("STEPS", 400))
if "--steps" in sys.argv:
    STEPS = int(sys.argv[sys.argv.index("--steps") + 1])
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda"
WIDTH, BATCH = (8192, 4096) if DEVICE == "cuda" else (64, 16)

torch.manual_seed(1)
w1 = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
w2 = torch.nn.Linear(WIDTH, WIDTH, device=DEVICE)
head = torch.nn.Linear(WIDTH, 100, device=DEVICE)
opt = torch.optim.SGD([*w1.parameters(), *w2.parameters(), *head.parameters()], lr=0.01, fused=True)
x = torch.randn(BATCH, WIDTH, device=DEVICE)
y = torch.randint(100, (BATCH,), device=DEVICE)
for _ in range(STEPS):
    h = head(w2(w1(x).relu()).relu())
    torch.nn.functional.cross_entropy(h, y).backward()
    opt.step()
    opt.zero_grad()
