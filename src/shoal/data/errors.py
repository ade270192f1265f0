"""What can be wrong with a data set."""

from shoal.core import ShoalError


class DataError(ShoalError):
    """A data set is not here, cannot be fetched, or is damaged."""
