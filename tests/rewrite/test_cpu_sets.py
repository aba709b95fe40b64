"""What a CPU without bfloat16 units computes, imitated by `xla_cpu_max_isa` in other processes."""

import concurrent.futures

import pytest

from benchmarks import cpu_digits


@pytest.mark.process
def test_errors_without_units_are_those_with_them():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with_units, without = pool.map(cpu_digits.errors_under, (None, "AVX2"))
    for name, levels in without.items():
        for level in levels.keys() - {cpu_digits.BY_HAND}:
            for one, other in zip(levels[level], with_units[name][level], strict=True):
                assert one <= 1.2 * other, (name, level)
