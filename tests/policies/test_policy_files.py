"""Policies as TOML files: what is saved is loaded, and a wrong file says what is wrong with it."""

import builtins
import codecs
import functools
import os
import pathlib
import sys
import tempfile

import pytest
from hypothesis import example, given, settings, strategies as st

from jmp_autocast import BF16, CastPolicy, Policy
from jmp_autocast.policies import STRUCTURAL, registry
from jmp_autocast.policies.precisions import PRECISIONS
from jmp_autocast.policies.tables import RULES_VERSION, TRACED_FOR_DTYPES
from jmp_autocast.policies.toml_file import policy_text
from tests.support.wrong_policy_files import HEAD, WRONG

FULL = (
    Policy("bfloat16", "float32", "compute", matmul="float8_row")
    .with_rules({"tanh": "FP32", "scatter-add": "KEEP", "exp": "float16"})
    .with_rules({"*": "float32"}, scope="*/LayerNorm_*")
    .with_rules({"dot_general": "FP32_APPEND_DTYPE", "*": "float8"}, scope="*/head")
    .with_rules({"*": "HIGHEST"}, scope="net/head")
)
FULL_TEXT = """\
# A policy of jmp_autocast: how a program is cast. Policy.load(path) reads this file.
# It is data: nothing in it is run or imported.
version = 2
rules_version = "0.1"
compute_dtype = "bfloat16"
output_dtype = "float32"
level = "compute"

# Scope, primitive or "*", and the rule: the innermost scope wins, then a named
# primitive, then the later rule.
rules = [
    ["*", "tanh", "FP32"],
    ["*", "scatter-add", "KEEP"],
    ["*", "exp", "float16"],
    ["*/LayerNorm_*", "*", "float32"],
    ["*/head", "dot_general", "FP32_APPEND_DTYPE"],
    ["*/head", "*", "float8"],
    ["net/head", "*", "highest"],
]

# Products of weights in 8 bits, and their options.
[matmul]
recipe = "float8"
scaling = "row"
"""

HOSTILE = [
    'a"b',
    "a\\b",
    "'''",
    '"""',
    'x", "FP32"],\n["*", "exp',
    "\r\n\t\b\f",
    "".join(map(chr, range(1, 33))) + "\x00\x7f\x80\x85\xa0\xad",
    "\u2028\u2029\u202e\ufeff\ufffe\uffff",
    "\u00e9\u0130\u4e2d\U0001f600\U000e0001\U0010ffff",
    "\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}",
    "x" * 5000,
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "policy.toml"


def test_the_text_of_a_file(path):
    FULL.save(path)
    assert path.read_text("utf-8") == FULL_TEXT
    assert Policy.load(path) == FULL
    assert b"\r" not in path.read_bytes()


def test_a_policy_of_defaults_is_short(path):
    Policy().save(path)
    assert Policy.load(path) == Policy()
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines == [
        "version = 2",
        f'rules_version = "{RULES_VERSION}"',
        'compute_dtype = "default"',
        'level = "o1"',
    ]


def test_what_is_shown_as_it_is_and_what_is_escaped():
    scope = "\u4e2d \"\\'\t\r\n\x1b\u202e\U000e0001"
    text = policy_text(Policy(rules=((scope, "*", "float32"),)))
    assert '\n    ["\u4e2d \\"\\\\\'\\t\\r\\n\\u001b\\U0000202E\\U000E0001", "*", ' in text


names = st.one_of(
    st.text(min_size=1),
    st.text(alphabet="\"'\\\n\r\t.#=[]{}\x00\x7f\u2028 aU0", min_size=1),
    st.sampled_from([*registry.known_primitives(), *HOSTILE]),
).filter(lambda name: name not in STRUCTURAL | TRACED_FOR_DTYPES)
floats = st.sampled_from(["float32", "float16", "bfloat16"])
cast_policies = st.sampled_from(CastPolicy)
whats = cast_policies | floats | st.sampled_from(["float8", *PRECISIONS])
policies = st.builds(
    Policy,
    compute_dtype=st.sampled_from(["float16", "bfloat16", "default"]),
    output_dtype=st.none() | floats,
    level=st.sampled_from(["tensor_cores", "o1", "compute", "by_hand"]),
    rules=st.lists(
        st.tuples(names, names, cast_policies | floats) | st.tuples(names, st.just("*"), whats)
    ).map(tuple),
    matmul=st.sampled_from([None, "float8", "float8_row"]),
)


def with_each_hostile_string(test):
    for text in HOSTILE:
        rules = ((text, text, CastPolicy.FP32), ("*", text, CastPolicy.KEEP))
        test = example(Policy(rules=(*rules, (text, "*", "float32"), ("*", "*", "float16"))))(test)
    return test


# A random name may be that of a function: "LINEAR" is.
@pytest.mark.filterwarnings("ignore:The policy has a rule for:UserWarning")
@settings(max_examples=200)
@with_each_hostile_string
@given(policies)
def test_what_is_saved_is_loaded(policy):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "policy.toml")
        policy.save(path)
        loaded = Policy.load(path)
        assert os.listdir(folder) == ["policy.toml"]
        # No line is more than one thing: what an editor breaks a line at is escaped.
        lines = path.read_bytes().count(b"\n")
        assert len(path.read_text("utf-8").splitlines()) == lines
    assert loaded == policy
    assert hash(loaded) == hash(policy)
    assert repr(loaded) == repr(policy)


@functools.cache
def text_of_full():
    return policy_text(FULL).encode()


@st.composite
def damaged(draw):
    """The text of a file with a piece of it replaced."""
    text = text_of_full()
    start = draw(st.integers(0, len(text)))
    stop = draw(st.integers(start, min(len(text), start + 40)))
    inner = draw(st.binary(max_size=20) | st.text(max_size=20).map(str.encode))
    return text[:start] + inner + text[stop:]


@settings(max_examples=300)
@given(damaged() | st.binary())
def test_a_damaged_file_is_a_policy_or_a_clear_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "policy.toml")
        path.write_bytes(content)
        try:
            found = Policy.load(path)
        except (TypeError, ValueError, UserWarning) as error:
            found = error
    if not isinstance(found, Policy):
        start = "The policy" if type(found) is UserWarning else f"Policy file {str(path)!r}"
        assert type(found) in (TypeError, ValueError, UserWarning)
        assert str(found).startswith(start)


# --- what a person may write -------------------------------------------------------------------

BY_HAND = {
    "the least": (HEAD, BF16),
    "a short dtype": ("version = 2\ncompute_dtype = 'bf16'\n", BF16),
    "a byte order mark": ("\ufeff" + HEAD, BF16),
    "Windows line ends": (HEAD.replace("\n", "\r\n"), BF16),
    "other spellings": (
        HEAD + "rules = [['*', 'tanh', 'fp32'], ['a', '*', 'f32'], ['a', '*', 'HIGHEST']]",
        BF16.with_rules({"tanh": "FP32"})
        .with_rules({"*": "float32"}, scope="a")
        .with_rules({"*": "highest"}, scope="a"),
    ),
    "a rule twice": (
        HEAD + "rules = [['a', 'tanh', 'KEEP'], ['*', 'tanh', 'PROMOTE'], ['a', 'tanh', 'FP32']]",
        BF16.with_rules({"tanh": "PROMOTE"}).with_rules({"tanh": "FP32"}, scope="a"),
    ),
}


@pytest.mark.parametrize(("text", "expected"), BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_files_written_by_hand(text, expected, kind, path):
    path.write_bytes(text.encode())
    assert Policy.load(kind(path)) == expected


# --- wrong files -------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "error", "parts"), WRONG.values(), ids=WRONG)
def test_a_wrong_file(content, error, parts, path, monkeypatch):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    codecs.lookup("utf-8-sig")  # Python imports a codec when it is first used
    before = set(sys.modules)
    for forbidden in ("eval", "exec"):
        monkeypatch.delattr(builtins, forbidden)
    with pytest.raises(error) as caught:
        Policy.load(path)
    monkeypatch.undo()
    assert caught.type is error
    message = str(caught.value)
    assert message.startswith(f"Policy file {str(path)!r}")
    position = len(str(path))
    for part in parts:
        assert part in message[position:], (part, message)
        position = message.index(part, position)
    assert len(message) < 600
    assert not {name for name in set(sys.modules) - before if not name.startswith("encodings")}
    assert os.listdir(path.parent) == [path.name]


def test_other_rules_warn(path):
    BF16.save(path)
    text = path.read_text("utf-8")
    path.write_text(text.replace(f'"{RULES_VERSION}"', '"0.0"'), "utf-8")
    with pytest.warns(UserWarning, match=r"under rules '0\.0'.*CHANGELOG\.md.*'Dtypes'") as caught:
        assert Policy.load(path) == BF16
    assert [w.filename for w in caught] == [__file__]
    path.write_text(HEAD, "utf-8")  # by hand: under the rules that there are
    assert Policy.load(path) == BF16


def test_loading_registers_nothing(path):
    path.write_text(HEAD + "rules = [['*', 'nobodys_primitive', 'FP32']]", "utf-8")
    before = dict(registry._registered)
    Policy.load(path)
    assert registry._registered == before
    assert "nobodys_primitive" not in registry.known_primitives()


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match=r"policy\.toml"):
        Policy.load(path)
    with pytest.raises(FileNotFoundError):
        BF16.save(path / "in no folder")


# --- policies that no file can hold, and files that cannot be written -------------------------


def my_rule(eqn):
    return CastPolicy.FP32


class Rule:
    def __call__(self, eqn):
        return CastPolicy.FP32

    def __repr__(self):
        return "<a rule>"


FUNCTIONS = {
    "a function": (my_rule, "my_rule"),
    "an object": (Rule(), "<a rule>"),
}
SURROGATES = {
    "a name": ("*", "a\ud800", CastPolicy.KEEP),
    "a pattern": ("a\udfff", "*", "float32"),
}


def unwritable():
    for what, (rule, name) in FUNCTIONS.items():
        policy = BF16.with_rules({"exp": "KEEP", "tanh": rule})
        parts = ["primitive 'tanh'", name, "a policy's name", "register_rule('tanh', ...)"]
        yield pytest.param(policy, TypeError, parts, id=what)
        policy = BF16.with_rules({"tanh": rule}, scope="*/head")
        yield pytest.param(policy, TypeError, parts, id=f"{what} in a scope")
    for what, rule in SURROGATES.items():
        policy = Policy(rules=(rule,))
        yield pytest.param(policy, UnicodeEncodeError, ["surrogates"], id=f"a surrogate in {what}")


@pytest.mark.parametrize("there", [None, "what was there"])
@pytest.mark.parametrize(("policy", "error", "parts"), list(unwritable()))
def test_a_policy_that_cannot_be_saved(policy, error, parts, there, path):
    if there:
        path.write_text(there, "utf-8")
    with pytest.raises(error) as caught:
        policy.save(path)
    assert caught.type is error
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert [p.read_text("utf-8") for p in path.parent.iterdir()] == ([there] if there else [])
