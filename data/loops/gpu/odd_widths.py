"""A recommender: which article is read next, from the last twenty."""

import sys

import torch
import torch.nn.functional as F

CONFIG = {"articles": 50257, "width": 1023, "hidden": 4093, "layers": 4, "sessions": 8192, "clicks": 20}
TINY = {"articles": 49, "width": 17, "hidden": 33, "layers": 2, "sessions": 4, "clicks": 3}


def settings(argv):
    on_gpu = torch.cuda.is_available()
    config = dict(TINY if "--tiny" in argv or not on_gpu else CONFIG)
    if "--fixed" in argv:
        for name in ("articles", "width", "hidden"):
            config[name] = -(-config[name] // 64) * 64
    steps = int(argv[argv.index("--steps") + 1]) if "--steps" in argv else 420
    return config, steps, torch.device("cuda" if on_gpu else "cpu")


def init(config, device):
    def matrix(rows, columns):
        return (torch.randn(rows, columns, device=device) * columns**-0.5).requires_grad_()

    width, hidden = config["width"], config["hidden"]
    weights = {"clicked": matrix(config["articles"], width), "next": matrix(config["articles"], width)}
    for layer in range(config["layers"]):
        weights[f"up{layer}"], weights[f"down{layer}"] = matrix(hidden, width), matrix(width, hidden)
    return weights


def predict(weights, clicks, layers):
    x = F.embedding_bag(clicks, weights["clicked"], mode="mean")
    for layer in range(layers):
        h = F.rms_norm(x, x.shape[-1:])
        x = x + F.linear(F.relu(F.linear(h, weights[f"up{layer}"])), weights[f"down{layer}"])
    return F.linear(F.rms_norm(x, x.shape[-1:]), weights["next"])


def train(config, steps, device):
    torch.manual_seed(0)
    weights = init(config, device)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4, fused=True)
    shape = config["sessions"], config["clicks"] + 1
    for step in range(steps):
        clicks = torch.randint(49 if config["articles"] < 100 else 50257, shape, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            scores = predict(weights, clicks[:, :-1], config["layers"])
            loss = F.cross_entropy(scores, clicks[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss


print("loss", train(*settings(sys.argv)).item())
