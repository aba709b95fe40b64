"""What devices exchange: dtypes and bytes."""

import pytest

from jmp_autocast.inspect.compiled.collectives import collectives
from tests.support.hlo_texts import module_of, read

COLLECTIVES = {
    "all-gather-start": (
        "(bf16[100]{0}, bf16[400]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]",
        3 * 200,
    ),
    "all-reduce": (
        "bf16[100]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        2 * 200 * 3 // 4,
    ),
    "all-reduce, a part of an axis": (
        "bf16[100]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a', 'b':(1)2}",
        2 * 200 * 3 // 4,
    ),
    "all-reduce, all devices": (
        "bf16[100]{0} all-reduce(%x), replica_groups={}, to_apply=%add",
        2 * 200 * 3 // 4,
    ),
    "all-to-all": ("bf16[100]{0} all-to-all(%x), replica_groups={{0,1}}", 100),
    "collective-broadcast": ("bf16[100]{0} collective-broadcast(%x), replica_groups={{0,1}}", 200),
    "reduce-scatter": ("bf16[25]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]", 150),
    "collective-permute": (
        "bf16[100]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        200,
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_that_a_device_sends(name):
    line, nbytes = COLLECTIVES[name]
    text = module_of(
        "%x = bf16[100]{0} parameter(0)", f"ROOT %y = {line}", header=", num_partitions=4"
    )
    module, found = read(text)
    (collective,) = collectives(found, module)
    kind = name.partition(",")[0].removesuffix("-start")
    assert (collective.kind, collective.times, collective.nbytes) == (f"{kind} bf16", 1, nbytes)
    assert found.nbytes == 0  # what goes over the wire is no traffic of a kernel


def test_without_a_number_of_devices_the_bytes_are_not_known():
    text = module_of("%x = f32[8]{0} parameter(0)", "ROOT %y = f32[8]{0} all-reduce(%x)")
    module, found = read(text)
    (collective,) = collectives(found, module)
    assert (collective.kind, collective.nbytes) == ("all-reduce f32", None)
