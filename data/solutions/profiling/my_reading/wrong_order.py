# The smallest stands first, and one of five is no large one.
# says: the one that gains most first
my_reading = {
    "vocabulary_64": ("model = slow_gpt(len(text.vocab), sizes)", 6),
    "bf16": ("logits = model(tokens, attend=attend)", 24),
    "short_padding": ("return F.pad(tokens, (0, self.length - len(tokens)), value=self.vocab.pad_id)", 13),
    "fused_loss": ("logarithms = torch.softmax(logits, dim=-1).clamp(min=1e-38).log()", 9),
    "positions_once": ("return x + sinusoids(*self.shape, device=x.device)[: x.shape[1]]", 2),
}
