"""Starting workers, and ending them together."""

from shoal.core.placement import num_cores
from shoal.launch.arguments import command_of
from shoal.launch.launcher import launch
from shoal.launch.output import Output, OutputListener, Terminal, settle_own_streams
from shoal.launch.settings import Elastic, LaunchSettings
from shoal.launch.worker import Death, Outcome

__all__ = [
    "Death",
    "Elastic",
    "LaunchSettings",
    "Outcome",
    "Output",
    "OutputListener",
    "Terminal",
    "command_of",
    "launch",
    "num_cores",
    "settle_own_streams",
]
