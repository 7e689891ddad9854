"""Import this first in a fork server: the server and its children then end with their parent process.

A child that outlives its parent would keep the fork server alive.
"""

from finetune.experiments.runner import worker_process

worker_process.tie()
