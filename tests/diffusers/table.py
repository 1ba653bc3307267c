"""``make families``: writes the tables of docs/diffusers.md.

Every model of ``models.py`` is compared with one process, by the cases of ``test_models.py`` on 2, 3 and 4 ranks. The
command stops if one is not equal. A few of these models are run with diffusers' own context parallelism as well.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, init_device_mesh

from seqpar.diffusers.plans import PLANS, REFUSED
from seqpar.patching.replaced import replaced

from ..pool import Pool, on_ranks
from .models import MASKED, MODELS, Case, class_of, installed, make, without_casts
from .test_models import cases, compare, distance, output, run, verify, weights

PAGE = Path(__file__).parents[2] / "docs" / "diffusers.md"
NOT_WRITTEN = "nobody has written a plan yet"
SEED = 0

BESIDE = {
    "12 image and 4 text tokens, 4 heads": Case("flux", "ulysses", text=4, heads=4, image=12),
    "13 image and 5 text tokens": Case("flux", "ulysses", heads=4),
    "3 heads": Case("flux", "ulysses", text=4, image=12),
    "1 text token": Case("flux", "ulysses", text=1, heads=4, image=12),
    "Z-Image": Case("z_image", "ulysses"),
    "SD 3.5": Case("sd35", "ulysses"),
}
CONTEXT_PARALLEL: dict[str, dict[str, Any]] = {
    "`ulysses_degree=2`": {"ulysses_degree": 2},
    "`ulysses_anything`": {"ulysses_degree": 2, "ulysses_anything": True},
    "`ring_degree=2`": {"ring_degree": 2},
    "`ring_anything`": {"ring_degree": 2, "ring_anything": True},
}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def compared(name: str) -> str:
    """What is compared for a class, in the words of its cases."""
    models = [model for model in MODELS if class_of(model) == name]
    words = [(MODELS[model].__doc__ or "").rstrip(".") for model in models]
    words += ["texts of different lengths"] if {*models} & {*MASKED} else []
    return "; ".join(word[0].lower() + word[1:] for word in words if word)


def equal(pool: Pool) -> list[str]:
    """The largest errors of each class with a plan."""
    largest = defaultdict[tuple[str, str], float](float)
    for model in MODELS:
        name = class_of(model)
        for world in (2, 3, 4):
            for case in cases(model, world):
                results = pool.run(world, compare, case, SEED, {})
                verify(case, results)
                print(f"{world} ranks, {case}: {words(results[0])}", flush=True)
                for what, error in (item for found in results for item in found.items()):
                    largest[name, what] = max(largest[name, what], error)
    columns = ["output", "weights", "inputs"]
    rows = [[f"`{name}`", compared(name), *(f"{largest[name, what]:.0e}" for what in columns)] for name in PLANS]
    return table(["class", "what was compared", *columns], rows)


def refused() -> list[str]:
    """The classes without a plan, by the reason."""
    names = defaultdict[str, list[str]](list)
    for name in sorted(installed().keys() - PLANS.keys()):
        names[REFUSED.get(name, NOT_WRITTEN)].append(f"`{name}`")
    rows = [[", ".join(some), why] for why, some in names.items()]
    return table(["classes", "why"], sorted(rows, key=lambda row: row[1] == NOT_WRITTEN))


def words(errors: dict[str, float]) -> str:
    return ", ".join(f"{what} {error:.0e}" for what, error in errors.items())


@on_ranks
def context_parallel(group: ProcessGroup, case: Case, options: dict[str, Any]) -> str:
    """The errors of diffusers' context parallelism, or the text of the error that it raises."""
    with without_casts():
        return errors_of(group, case, options)


def errors_of(group: ProcessGroup, case: Case, options: dict[str, Any]) -> str:
    model, inputs = make(case, SEED)
    out, input_grads = run(model, inputs)
    grads = weights(model)
    errors = {}
    try:
        config = diffusers.ContextParallelConfig(**options)
        config.mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        with replaced(torch.accelerator, device_count=lambda: 2):  # diffusers divides by it
            model.enable_parallelism(config=config)
        with torch.no_grad():
            errors["output"] = distance({"": output(model, inputs)}, {"": out})
        _, found = run(model, inputs)
        found_weights = weights(model)
        for x in (*found_weights.values(), *found.values()):
            dist.all_reduce(x, group=group)  # diffusers leaves its part to each rank
        errors |= {"weights": distance(found_weights, grads), "inputs": distance(found, input_grads)}
    except Exception as error:
        return "; ".join(filter(None, [words(errors), " ".join(str(error).split())]))
    return words(errors)


def beside(pool: Pool) -> list[str]:
    """Diffusers' own context parallelism beside ``parallelize``. Of the ranks, which agree, the first one's result."""
    rows = []
    for name, case in BESIDE.items():
        theirs = [pool.run(2, context_parallel, case, options)[0] for options in CONTEXT_PARALLEL.values()]
        rows.append([name, *theirs, words(pool.run(2, compare, case, SEED, {})[0])])
    return table(["case", *CONTEXT_PARALLEL, "seqpar"], rows)


def write(mark: str, lines: list[str]) -> None:
    before, rest = PAGE.read_text().split(f"<!-- {mark} -->\n")
    after = rest.split(f"<!-- /{mark} -->\n")[1]
    PAGE.write_text(before + "\n".join([f"<!-- {mark} -->", "", *lines, "", f"<!-- /{mark} -->", ""]) + after)


def main() -> None:
    pool = Pool(4, 240.0, worlds=(2, 3))
    rows = equal(pool)
    pool.close()
    pool = Pool(2)  # diffusers makes its groups of all ranks
    others = beside(pool)
    pool.close()
    versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
    every = len(installed())
    count = f"of {every} transformer classes, {len(PLANS)} have a plan, and {every - len(PLANS)} are refused"
    write("make families", [f"{versions}: {count}.", "", *rows, "", "Refused:", "", *refused()])
    write("make families: context parallelism", [f"{versions}:", "", *others])


if __name__ == "__main__":
    main()
