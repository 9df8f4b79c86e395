"""Electricity load forecasting with an LSTM behind a compile()/fit() interface."""
import time

import numpy as np
import torch
from torch import nn


class History:
    def __init__(self):
        self.logs = {}

    def append(self, **kw):
        for k, v in kw.items():
            self.logs.setdefault(k, []).append(v)


class EarlyStopping:
    def __init__(self, monitor="val_loss", patience=10):
        self.monitor, self.patience, self.best, self.wait = monitor, patience, float("inf"), 0
        self.weights = None

    def on_epoch_end(self, model, logs):
        if logs[self.monitor] < self.best - 1e-5:
            self.best, self.wait = logs[self.monitor], 0
            self.weights = {k: v.clone() for k, v in model.state_dict().items()}
        else:
            self.wait += 1
            model.stop_training = self.wait >= self.patience


class ReduceLROnPlateau:
    def __init__(self, factor=0.5, patience=4):
        self.factor, self.patience, self.best, self.wait = factor, patience, float("inf"), 0

    def on_epoch_end(self, model, logs):
        if logs["val_loss"] < self.best:
            self.best, self.wait = logs["val_loss"], 0
        else:
            self.wait += 1
            if self.wait > self.patience:
                self.wait = 0
                for g in model.optimizer.param_groups:
                    g["lr"] *= self.factor


class KerasLike(nn.Module):
    stop_training = False

    def compile_with(self, optimizer, loss, metrics=()):
        self.optimizer, self.loss_fn, self.metrics = optimizer, loss, dict(metrics)

    def fit(self, x, y, batch_size, epochs, validation_data, callbacks=(), verbose=1):
        history = History()
        for epoch in range(epochs):
            self.train()
            start, total, count = time.time(), 0.0, 0
            for idx in torch.randperm(len(x)).split(batch_size):
                loss = self.loss_fn(self(x[idx]), y[idx])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total, count = total + loss.item() * len(idx), count + len(idx)
            logs = {"loss": total / count, **self.evaluate(*validation_data, batch_size=512)}
            history.append(**logs)
            if verbose:
                shown = " - ".join(f"{k}: {v:.4f}" for k, v in logs.items())
                print(f"Epoch {epoch + 1}/{epochs} - {time.time() - start:.1f}s - {shown}", flush=True)
            for cb in callbacks:
                cb.on_epoch_end(self, logs)
            if self.stop_training:
                break
        return history

    @torch.no_grad()
    def predict(self, x, batch_size):
        self.eval()
        return torch.cat([self(chunk) for chunk in x.split(batch_size)])

    def evaluate(self, x, y, batch_size):
        pred = self.predict(x, batch_size)
        out = {"val_loss": self.loss_fn(pred, y).item()}
        out.update({f"val_{name}": fn(pred, y).item() for name, fn in self.metrics.items()})
        return out


class LoadForecaster(KerasLike):
    def __init__(self, n_features, hidden=96, layers=2, horizon=24):
        super().__init__()
        self.rnn = nn.LSTM(n_features, hidden, layers, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, horizon))

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def load_series(hours=12000, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(hours)
    temp = 10 + 9 * np.sin(2 * np.pi * t / 8766) + 4 * np.sin(2 * np.pi * t / 24 - 2) + rng.normal(0, 1, hours)
    load = 50 + 12 * np.sin(2 * np.pi * t / 24) - 6 * (t // 24 % 7 >= 5) - 0.7 * temp + rng.normal(0, 1.5, hours)
    feats = np.stack([load, temp, np.sin(2 * np.pi * t / 24), np.cos(2 * np.pi * t / 24), t // 24 % 7 >= 5], 1)
    return ((feats - feats.mean(0)) / feats.std(0)).astype(np.float32)


def windows(series, history=48, horizon=24):
    view = np.lib.stride_tricks.sliding_window_view(series, history + horizon, axis=0)[::2]
    x = torch.from_numpy(np.ascontiguousarray(view[:, :, :history].transpose(0, 2, 1)))
    y = torch.from_numpy(np.ascontiguousarray(view[:, 0, history:]))
    return x, y


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = windows(load_series())
    cut = len(x) - 240
    model = LoadForecaster(x.shape[-1])
    model.compile_with(torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.95), nn.MSELoss(),
                       metrics={"mae": nn.functional.l1_loss})
    model.fit(x[:cut], y[:cut], batch_size=128, epochs=60, validation_data=(x[cut:], y[cut:]),
              callbacks=[EarlyStopping(patience=40), ReduceLROnPlateau()])
