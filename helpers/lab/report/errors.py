"""The one error of this package."""

from nbconvert.utils.exceptions import ConversionException


class BuildError(ConversionException):
    """What stopped the report, in one message for the person who wrote the notebook.

    It is a `ConversionException` so that `jupyter nbconvert` knows it and exits with an error.
    """
