"""A course's handout: the notebooks and this package, without what an exercise asks for."""

from .handout import hand_out

__all__ = ["hand_out"]
