# A step takes as long as it sleeps, on any machine: time passes nowhere else. A script that ends soon runs again.
import sys, time, torch
time.passed = getattr(time, "passed", time.perf_counter())
time.perf_counter = lambda: time.passed
def sleep(seconds):
    time.passed += seconds
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    sleep(float(sys.argv[2]))
