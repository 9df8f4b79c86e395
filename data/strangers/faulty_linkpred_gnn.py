"""Link prediction on a citation-like graph. GraphSAGE encoder, dot decoder, plain torch."""
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from sklearn.metrics import average_precision_score


def citation_graph(num_nodes, num_edges, num_topics, dim, seed=0):
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, num_topics, num_nodes)
    by_topic = [np.flatnonzero(topic == k) for k in range(num_topics)]
    pairs = set()
    while len(pairs) < num_edges:
        u = int(rng.integers(num_nodes))
        v = int(rng.choice(by_topic[topic[u]])) if rng.random() < 0.85 else int(rng.integers(num_nodes))
        if u != v:
            pairs.add((min(u, v), max(u, v)))
    centers = rng.standard_normal((num_topics, dim))
    x = centers[topic] + 1.5 * rng.standard_normal((num_nodes, dim))
    return torch.tensor(x, dtype=torch.float32), sorted(pairs)


def mean_adjacency(edges, num_nodes):
    e = torch.tensor(edges).t()
    row, col = torch.cat([e[0], e[1]]), torch.cat([e[1], e[0]])
    deg = torch.bincount(row, minlength=num_nodes).clamp_min(1)
    adj = torch.sparse_coo_tensor(torch.stack([row, col]), 1.0 / deg[row].float(), (num_nodes, num_nodes))
    return adj.coalesce().to_sparse_csr()


class SageLayer(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.self_lin = nn.Linear(d_in, d_out)
        self.neigh_lin = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x, adj):
        return self.self_lin(x) + adj @ self.neigh_lin(x)


class LinkModel(nn.Module):
    def __init__(self, d_in, hidden, layers):
        super().__init__()
        dims = [d_in] + [hidden] * layers
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in zip(dims, dims[1:]))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers - 1))

    def encode(self, x, adj):
        for i, layer in enumerate(self.layers):
            x = layer(x, adj)
            if i < len(self.norms):
                x = F.relu(self.norms[i](x))
        return x

    @staticmethod
    def decode(z, pairs):
        return (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(-1)


def sample_negatives(k, num_nodes, edges):
    negatives = []
    while len(negatives) < k:
        u = random.randrange(num_nodes)
        v = random.randrange(num_nodes)
        pair = (min(u, v), max(u, v))
        if u != v and pair not in edges:
            negatives.append(pair)
    return torch.tensor(negatives)


@torch.no_grad()
def average_precision(model, x, adj, pos, neg):
    model.eval()
    z = model.encode(x, adj)
    scores = torch.cat([model.decode(z, pos), model.decode(z, neg)])
    labels = torch.cat([torch.ones(len(pos)), torch.zeros(len(neg))])
    model.train()
    return average_precision_score(labels.numpy(), scores.numpy())


def run(epochs=400, batch=384, hidden=192, layers=3, lr=3e-3, num_nodes=2500):
    torch.manual_seed(1)
    random.seed(1)
    x, edges = citation_graph(num_nodes, 9000, 12, 128)
    random.shuffle(edges)
    val, train = edges[:500], edges[500:]
    adj = mean_adjacency(train, num_nodes)
    val_pos, val_neg = torch.tensor(val), sample_negatives(len(val), num_nodes, edges)
    train_pos = torch.tensor(train)

    model = LinkModel(x.size(1), hidden, layers)
    opt = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for epoch in range(1, epochs + 1):
        start, total = time.perf_counter(), 0.0
        for chunk in torch.randperm(len(train_pos)).split(batch):
            pos = train_pos[chunk]
            neg = sample_negatives(len(pos), num_nodes, edges)
            z = model.encode(x, adj)
            logits = model.decode(z, torch.cat([pos, neg]))
            target = torch.zeros(len(logits))
            target[: len(pos)] = 1
            loss = F.binary_cross_entropy_with_logits(logits, target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(pos)
        msg = f"[{epoch:03d}] loss {total / len(train_pos):.4f} ({time.perf_counter() - start:.2f}s)"
        if epoch % 5 == 0:
            msg += f"  val AP {average_precision(model, x, adj, val_pos, val_neg):.3f}"
        print(msg, flush=True)


if __name__ == "__main__":
    run()
