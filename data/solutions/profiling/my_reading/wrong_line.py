# Two lines are those where the time is spent, not those of the fault.
# says: each at its line: elsewhere: ['short_padding', 'fused_loss']
my_reading = {
    "bf16": ("logits = model(tokens, attend=attend)", 24),
    "short_padding": ("loss.backward()", 13),
    "fused_loss": ("losses.append(loss.item())", 9),
    "width_1024": ('length, shape = sizes["max_length"] + 1, sizes["shape"][0]', 8.5),
    "vocabulary_64": ("model = slow_gpt(len(text.vocab), sizes)", 6),
}
