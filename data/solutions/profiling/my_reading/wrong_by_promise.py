# The profiler's shares of operators are taken for gains.
# says: each gain is that of its fix alone: not what fixing it alone gains: ['bf16', 'short_padding', 'fused_loss']
my_reading = {
    "bf16": ("logits = model(tokens, attend=attend)", 61),
    "short_padding": ("return F.pad(tokens, (0, self.length - len(tokens)), value=self.vocab.pad_id)", 55),
    "fused_loss": ("logarithms = torch.softmax(logits, dim=-1).clamp(min=1e-38).log()", 30),
    "width_1024": ('length, shape = sizes["max_length"] + 1, sizes["shape"][0]', 8.5),
    "vocabulary_64": ("model = slow_gpt(len(text.vocab), sizes)", 6),
}
