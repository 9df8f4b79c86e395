import torch


class MyPositionalEncoding(torch.nn.Module):
    def __init__(self, d_model, max_length=5000, dropout=0.0):
        super().__init__()
        rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        turns = torch.polar(torch.ones(1, 1).double(), torch.arange(max_length)[:, None] * rates)
        self.register_buffer("table", torch.view_as_real(turns).flip(-1).flatten(1).float())
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, positions=None):
        rows = self.table[: x.size(1)] if positions is None else self.table[positions]
        return self.dropout(x + rows)
