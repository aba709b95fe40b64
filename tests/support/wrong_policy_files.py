"""Files that are no policies: the content, the error, and parts of its message in their order."""

HEAD = "version = 2\ncompute_dtype = 'bfloat16'\n"
COMPUTE = "compute_dtype must be a dtype, got 'bfloat61'"
KEYS = "The keys are compute_dtype, output_dtype, level, rules, matmul"
WRITE = "Write rules = [['*', 'tanh', 'float32']]"
NEST = 10_000


def rule(*words):
    return f"{HEAD}rules = [['a', 'tanh', 'KEEP'], {list(words)}]"


WRONG = {
    "no version": (
        "compute_dtype = 'bfloat16'",
        ValueError,
        ["version must be 2, got None"],
    ),
    "a newer version": (
        "version = 3\nfeature = 'new'",
        ValueError,
        ["version must be 2, got 3", "a newer jmp_autocast"],
    ),
    "the version before": (
        "version = 1\ncompute_dtype = 'bfloat16'\n[scopes]",
        ValueError,
        ["version must be 2, got 1", "scopes and precisions", "rules = [['*', 'tanh'"],
    ),
    "version as a string": ("version = '2'", ValueError, ["version must be 2, got '2'"]),
    "no compute dtype": ("version = 2", ValueError, ["no compute_dtype", "Add: compute_dtype"]),
    "a key": (
        "version = 2\ncompute_dtpye = 'bfloat16'",
        ValueError,
        ["unknown key 'compute_dtpye'.", "mean 'compute_dtype'", KEYS],
    ),
    "a long key": (HEAD + "x" * 9999 + " = 1", ValueError, ["'xxx", "...", KEYS]),
    "compute dtype": (
        "version = 2\ncompute_dtype = 'bfloat61'",
        ValueError,
        [COMPUTE, "Pass one such as"],
    ),
    "a key that is gone": (
        HEAD + "dot_output = 'consumer'",
        ValueError,
        ["unknown key 'dot_output'. Write with_rules({'dot_general'", KEYS],
    ),
    "products": (
        HEAD + "matmul = 'float8'",
        TypeError,
        ["a table with a recipe", "[matmul]"],
    ),
    "no recipe": (f"{HEAD}[matmul]\nwgrad = 'compute'", TypeError, ["with a recipe", "[matmul]"]),
    "a recipe": (
        f"{HEAD}[matmul]\nrecipe = 'float9'",
        ValueError,
        ["matmul must be", "'float8_row'"],
    ),
    "an option of a recipe": (
        f"{HEAD}[matmul]\nrecipe = 'float8'\nscale = 'row'",
        TypeError,
        ["unexpected keyword argument 'scale'"],
    ),
    # Rules.
    "rules as a table": (
        HEAD + "[rules]\ntanh = 'FP32'",
        TypeError,
        ["rules must be an array of three", "got {'tanh': 'FP32'} of type dict", WRITE],
    ),
    "rules as words": (
        HEAD + "rules = ['FP32']",
        TypeError,
        ["rules must be an array of three words", "got ['FP32']", WRITE],
    ),
    "two words": (rule("tanh", "FP32"), TypeError, ["must be an array of three words", WRITE]),
    "no name": (rule("*", "", "KEEP"), TypeError, ["A primitive is given by its name", "got ''"]),
    # Not TOML.
    "not TOML": (
        HEAD + "level: o1",
        ValueError,
        ["not valid TOML", "at line 3", "Compare", "Policy.save"],
    ),
    "a key twice": (HEAD + "version = 2", ValueError, ["not valid TOML", "overwrite"]),
    "too many digits": (HEAD + "level = " + "9" * 5000, ValueError, ["not valid TOML", "4300"]),
    "deep arrays": (HEAD + "level = " + "[" * NEST + "]" * NEST, ValueError, ["not valid TOML"]),
    # Not UTF-8.
    "Latin-1": (
        "# \xe9\n".encode("latin-1"),
        ValueError,
        ["not valid TOML", "byte 0xe9 in position 2"],
    ),
}
