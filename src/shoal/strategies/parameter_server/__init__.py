"""`parameter-server` and `staleness-aware`: workers push gradients to servers, and pull parameters from them.

`strategy` is what a user's loop sees, `client` a worker's pushes and pulls, `server` what the servers do with
them, `channel` how the model is divided and what goes between them.
"""

from shoal.strategies.parameter_server.strategy import ParameterServer, StalenessAwareSGD

__all__ = ["ParameterServer", "StalenessAwareSGD"]
