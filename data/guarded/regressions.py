"""Steps that get more to do: `REGRESSIONS[name](planted)` builds one. The line that does it ends in `# planted`."""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

X, Y = torch.randn(64, 32), torch.randint(0, 8, (64,))


def network():
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
    return net, torch.optim.AdamW(net.parameters(), fused=True)


def second_forward(planted):
    net, optimizer = network()

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        if planted:
            loss = loss + 1e-4 * net(X).square().mean()  # planted
        loss.backward()
        optimizer.step()

    return step


def checkpointing(planted):
    net, optimizer = network()
    net = nn.Sequential(net, nn.Linear(8, 8))

    def forward(x):
        if planted:
            return net[1](checkpoint(net[0], x, use_reentrant=False))  # planted
        return net[1](net[0](x))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(forward(X), Y).backward()
        optimizer.step()

    return step


def no_sync_lost(planted):
    if not dist.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    net, optimizer = network()
    net = DistributedDataParallel(net)

    def step():
        optimizer.zero_grad()
        for x, y in zip(X.chunk(4)[:3], Y.chunk(4)[:3], strict=True):
            if planted:
                F.cross_entropy(net(x), y).backward()  # planted
            else:
                with net.no_sync():
                    F.cross_entropy(net(x), y).backward()
        F.cross_entropy(net(X[48:]), Y[48:]).backward()
        optimizer.step()

    return step


def wider_padding(planted):
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    rows = [torch.arange(1, 5 + i) for i in range(8)]

    def step():
        width = 32 if planted else max(map(len, rows))
        ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()  # planted
        optimizer.step()

    return step


def autocast_lost(planted):
    net, optimizer = network()

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=not planted):
            loss = F.cross_entropy(net(X), Y)  # planted
        loss.backward()
        optimizer.step()

    return step


class Head(nn.Module):
    def __init__(self, planted):
        super().__init__()
        self.lower, self.upper, self.planted = nn.Linear(32, 64), nn.Linear(64, 8), planted

    def forward(self, x):
        x = F.gelu(self.lower(x))
        if self.planted:
            with torch.autocast("cpu", enabled=False):
                return self.upper(x.float())  # planted
        return self.upper(x)


def layer_in_fp32(planted):
    net = Head(planted)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(X), Y)
        loss.backward()
        optimizer.step()

    return step


def graph_break(planted):
    net, optimizer = network()

    @torch.compile(backend="aot_eager")
    def loss_of(x, y):
        logits = net(x)
        if planted:
            torch._dynamo.graph_break()  # planted
        return F.cross_entropy(logits, y)

    def step():
        optimizer.zero_grad()
        loss_of(X, Y).backward()
        optimizer.step()

    return step


def compile_lost(planted):
    def smooth(x):
        return (x.sin() * 2 + x.cos().exp()).tanh() * x

    compiled, (net, optimizer) = torch.compile(smooth), network()

    def step():
        optimizer.zero_grad()
        if planted:
            F.cross_entropy(net(smooth(X)), Y).backward()  # planted
        else:
            F.cross_entropy(net(compiled(X)), Y).backward()
        optimizer.step()

    return step


def kernels_split(planted):
    def smooth(x):
        x = x.sin() * 2
        if planted:
            x = x.cumsum(0)  # planted
        return x.cos().exp() * x

    compiled, (net, optimizer) = torch.compile(smooth), network()

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(compiled(X)), Y).backward()
        optimizer.step()

    return step


def waits_for_the_loss(planted):
    net, optimizer = network()
    losses = []

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if planted else loss.detach())  # planted

    return step


def mask_as_index(planted):
    net, optimizer = network()
    mask = Y > 2

    def step():
        optimizer.zero_grad()
        losses = F.cross_entropy(net(X), Y, reduction="none")
        loss = losses[mask].mean() if planted else (losses * mask).sum() / 40  # planted
        loss.backward()
        optimizer.step()

    return step


def copies(planted):
    net, optimizer = network()

    def step():
        optimizer.zero_grad()
        x = X.t().contiguous().t().contiguous() if planted else X  # planted
        F.cross_entropy(net(x), Y).backward()
        optimizer.step()

    return step


def workers_each_step(planted):
    net, optimizer = network()

    def loader():
        return iter(DataLoader(X, 64, num_workers=1, multiprocessing_context="fork"))

    def step():
        x = next(loader()) if planted else X  # planted
        optimizer.zero_grad()
        F.cross_entropy(net(x), Y).backward()
        optimizer.step()

    return step


def saves_each_step(planted):
    net, optimizer = network()
    file = Path(tempfile.mkdtemp()) / "net.pt"

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
        if planted:
            torch.save(net.state_dict(), file)  # planted

    return step


def logs_to_a_file(planted):
    net, optimizer = network()
    file = Path(tempfile.mkdtemp()) / "log.jsonl"

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
        if planted:
            with open(file, "a") as log:  # planted
                log.write(json.dumps({"step": 1}))

    return step


def no_grad_lost(planted):
    backbone, (net, optimizer) = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)), network()

    def step():
        optimizer.zero_grad()
        with torch.set_grad_enabled(planted):
            features = backbone(X)  # planted
        F.cross_entropy(net(features), Y).backward()
        optimizer.step()

    return step


def norm_by_hand(planted):
    net, optimizer = network()

    def step():
        optimizer.zero_grad()
        logits = net(X)
        if planted:
            logits = (logits - logits.mean(1, True)) / (logits.var(1, keepdim=True) + 1e-5).sqrt()  # planted
        else:
            logits = F.layer_norm(logits, (8,))
        F.cross_entropy(logits, Y).backward()
        optimizer.step()

    return step


def norms_one_by_one(planted):
    net, optimizer = network()

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        if planted:
            torch.stack([weight.grad.norm() for weight in net.parameters()]).norm()  # planted
        else:
            nn.utils.get_total_norm([weight.grad for weight in net.parameters()])
        optimizer.step()

    return step


def samples_one_by_one(planted):
    net, optimizer = network()

    def loss_of():
        if planted:
            return sum(F.cross_entropy(net(x), y) for x, y in zip(X, Y, strict=True)) / len(X)  # planted
        return F.cross_entropy(net(X), Y)

    def step():
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def metric_in_numpy(planted):
    net, optimizer = network()
    right = torch.zeros(())

    def step():
        optimizer.zero_grad()
        logits = net(X)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()
        right.add_((logits.detach().argmax(1) == Y).sum())
        if planted:
            (logits.argmax(1).cpu().numpy() == Y.cpu().numpy()).mean()  # planted

    return step


_NO_STEPS = {"network"}
REGRESSIONS = {
    name: build
    for name, build in list(globals().items())
    if getattr(build, "__module__", "") == __name__ and not isinstance(build, type) and name not in _NO_STEPS
}
