import math

import torch


class MyPositionalEncoding(torch.nn.Module):
    def __init__(self, d_model, max_length=5000, dropout=0.0):
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        p = torch.arange(max_length).double()[:, None]
        rates = torch.exp(torch.arange(0, d_model, 2).double() * (-math.log(10000.0) / d_model))
        table = torch.zeros(max_length, d_model)
        table[:, 0::2], table[:, 1::2] = torch.sin(p * rates), torch.cos(p * rates)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, positions=None):
        rows = self.table[: x.shape[1]] if positions is None else self.table[positions]
        return self.dropout(x + rows.to(x.dtype))
