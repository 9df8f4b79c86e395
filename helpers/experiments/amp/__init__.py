"""What chapter 1 measures: where fp16 loses gradients, what each precision costs and how well it trains."""

from .gradients import exponents, gradient_time, zeros
from .overheads import autocast_overhead, scaler_step
from .trainings import curves, quality
