"""Handle the processes of a launch: their environment, collectives and sharded tensors."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.distributed.collectives import all_of as all_of
    from finetune.distributed.collectives import any_of as any_of
    from finetune.distributed.collectives import from_main as from_main
    from finetune.distributed.collectives import gathered as gathered
    from finetune.distributed.sharded_tensors import whole as whole

__all__ = ["all_of", "any_of", "from_main", "gathered", "whole"]

__getattr__ = lazy_imports(
    __name__,
    {
        "all_of": "collectives.all_of",
        "any_of": "collectives.any_of",
        "from_main": "collectives.from_main",
        "gathered": "collectives.gathered",
        "whole": "sharded_tensors.whole",
    },
)
