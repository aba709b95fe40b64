"""Files that are no policies: the content, the error, and parts of its message in their order."""

HEAD = "version = 1\ncompute_dtype = 'bfloat16'\n"
COMPUTE = "must be one of 'float16', 'bfloat16', 'default', got"
FLOATS = "must be one of 'float32', 'float16', 'bfloat16', "
A_STRING = "must be a string, one of"
KEYS = (
    "The keys are version, rules_version, compute_dtype, output_dtype, level, dot_output, "
    "weight_gradients, matmul, rules, scopes, scoped_rules"
)
NEST = 10_000
BIG = 0x10000 * "F"


def scope(lines):
    return f"{HEAD}[[scopes]]\npattern = 'a'\ndtype = 'float32'\n[[scopes]]\n{lines}"


def scoped(lines):
    first = "[[scoped_rules]]\npattern = 'a'\nrules = {tanh = 'FP32'}\n"
    return f"{HEAD}{first}[[scoped_rules]]\n{lines}"


WRONG = {
    "no version": ("compute_dtype = 'bfloat16'", ValueError, ["no version", "version = 1"]),
    "empty": ("", ValueError, ["no version", "version = 1"]),
    "a newer version": (
        "version = 2\nfeature = 'new'",
        ValueError,
        ["version 2, and", "reads version 1", "Upgrade jmp_autocast"],
    ),
    "version 0": ("version = 0", ValueError, ["version 0", "version = 1"]),
    "version as a string": ("version = '1'", TypeError, ["version", "an integer, got '1'"]),
    "version as a bool": ("version = true", TypeError, ["version", "True of type bool"]),
    "version as a table": ("[version]", TypeError, ["version", "a table"]),
    "a word for a kernel": (
        HEAD + "[kernels]\nsplash = 'computed'",
        ValueError,
        ["kernels.splash must be one of 'compute', ", "got 'computed'", "Did you mean 'compute'"],
    ),
    "a dtype for what is stored": (
        HEAD + "[storage]\n'*cache*' = 'bfloat16'",
        ValueError,
        ["storage.'*cache*' must be one of 'compute', 'declared', got 'bfloat16'"],
    ),
    "kernels as a list": (
        HEAD + "kernels = ['splash']",
        TypeError,
        ["kernels must be a table, got an array", "splash = 'compute'"],
    ),
    "a kernel without a name": (HEAD + "[kernels]\n'' = 'compute'", ValueError, ["an empty name"]),
    "rules as a float": (
        HEAD + "rules_version = 0.1",
        TypeError,
        ["rules_version must be a string", "0.1 of type float", "Write: rules_version = '"],
    ),
    "a huge version": (
        f"version = 0x{BIG}",
        ValueError,
        ["version 0xffffffffffffffff..., and", "Upgrade"],
    ),
    "no compute dtype": ("version = 1", ValueError, ["no compute_dtype", "Add: compute_dtype"]),
    "a key": (
        "version = 1\ncompute_dtpye = 'bfloat16'",
        ValueError,
        ["unknown key 'compute_dtpye'.", "mean 'compute_dtype'", KEYS],
    ),
    "a key of another kind": (HEAD + "params = 'float32'", ValueError, ["key 'params'", KEYS]),
    "a long key": (HEAD + "x" * 9999 + " = 1", ValueError, [f"'{'x' * 80}...'", KEYS]),
    "compute dtype": (
        "version = 1\ncompute_dtype = 'bfloat61'",
        ValueError,
        ["compute_dtype", COMPUTE, "'bfloat61'", "mean 'bfloat16'"],
    ),
    "an output in float64": (
        HEAD + "output_dtype = 'float64'",
        ValueError,
        ["output_dtype", FLOATS, "'float64'"],
    ),
    "a dtype's code": (HEAD + "output_dtype = 'f4'", ValueError, ["output_dtype", FLOATS, "'f4'"]),
    "no dtype": (HEAD + "output_dtype = ''", ValueError, ["output_dtype", FLOATS, "''"]),
    "a level": (HEAD + "level = 'o2'", ValueError, ["level", "'tensor_cores'", "'o2'", "an 'o1'"]),
    "a number as level": (HEAD + "level = 1", TypeError, ["level", A_STRING, "1 of type int"]),
    "dot_output": (
        HEAD + "dot_output = 'costumer'",
        ValueError,
        ["dot_output", "'costumer'", "mean 'consumer'"],
    ),
    # Rules.
    "rules as an array": (
        HEAD + "rules = ['FP32']",
        TypeError,
        ["rules must be a table", "an array", "Write a line [rules]"],
    ),
    "a policy": (
        HEAD + "[rules]\ntanh = 'FP23'",
        ValueError,
        ["rules.tanh must be one of 'LOWER_PRECISION_FP', 'FP32'", "'FP23'", "mean 'FP32'"],
    ),
    "a bool as a policy": (HEAD + "[rules]\n'a b' = true", TypeError, ["rules.'a b'", "True of"]),
    "a structural primitive": (
        HEAD + "[rules]\nscan = 'KEEP'",
        ValueError,
        ["rules.scan", "'scan' is structural", "with_scopes"],
    ),
    "no name": (HEAD + "[rules]\n'' = 'KEEP'", ValueError, ["rules.'' names no primitive"]),
    "code as a policy": (
        HEAD + "[rules]\nexp = \"__import__('os').system('touch pwned')\"",
        ValueError,
        ["rules.exp", "__IMPORT__"],
    ),
    # Scopes.
    "scopes as a table": (
        HEAD + "[scopes]\n'*/ln' = 'float32'",
        TypeError,
        ["scopes must be an array of tables, got a table", "[[scopes]]"],
    ),
    "no pattern": (scope("dtype = 'float32'"), ValueError, ["scopes[1] has no pattern", "Write"]),
    "no scope dtype": (scope("pattern = 'b'"), ValueError, ["scopes[1] has no dtype", "Write"]),
    "a scope's key": (
        scope("pattern = 'b'\ndtpye = 'float32'"),
        ValueError,
        ["scopes[1]: unknown key 'dtpye'", "mean 'dtype'", "The keys are pattern, dtype"],
    ),
    "an empty pattern": (
        scope("pattern = ''\ndtype = 'float32'"),
        ValueError,
        ["scopes[1].pattern is empty", "'*/LayerNorm_*'"],
    ),
    "a scope's dtype": (
        scope("pattern = 'b'\ndtype = 'float46'"),
        ValueError,
        ["scopes[1].dtype", FLOATS, "'float46'", "mean 'float"],
    ),
    # Rules in scopes.
    "scoped rules as a table": (
        HEAD + "[scoped_rules]\n'*/head' = 'FP32'",
        TypeError,
        ["scoped_rules must be an array of tables, got a table", "[[scoped_rules]]"],
    ),
    "no pattern of rules": (
        scoped("[scoped_rules.rules]\ntanh = 'FP32'"),
        ValueError,
        ["scoped_rules[1] has no pattern", "Write"],
    ),
    "no rules of a pattern": (
        scoped("pattern = 'b'"),
        ValueError,
        ["scoped_rules[1] has no rules", "[scoped_rules.rules]"],
    ),
    "rules of a pattern as a string": (
        scoped("pattern = 'b'\nrules = 'FP32'"),
        TypeError,
        ["scoped_rules[1].rules must be a table, got 'FP32'", "[scoped_rules.rules]"],
    ),
    "a policy in a scope": (
        scoped("pattern = 'b'\nrules = {tanh = 'FP23'}"),
        ValueError,
        ["scoped_rules[1].rules.tanh must be one of", "'FP23'", "mean 'FP32'"],
    ),
    # Not TOML.
    "not TOML": (
        HEAD + "level: o1",
        ValueError,
        ["not valid TOML", "at line 3", "Compare", "Policy.save"],
    ),
    "a bare word": (HEAD + "level = o1", ValueError, ["not valid TOML", "at line 3"]),
    "JSON": ('{"version": 1}', ValueError, ["not valid TOML", "at line 1"]),
    "a key twice": (HEAD + "version = 1", ValueError, ["not valid TOML", "overwrite"]),
    "a table twice": (HEAD + "[rules]\n[rules]", ValueError, ["not valid TOML", "at line 4"]),
    "a surrogate": (HEAD + 'level = "\\ud800"', ValueError, ["not valid TOML", "at line 3"]),
    "a day that is none": (HEAD + "level = 1979-02-31", ValueError, ["not valid TOML"]),
    "too many digits": (HEAD + "level = " + "9" * 5000, ValueError, ["not valid TOML", "4300"]),
    "deep arrays": (HEAD + "level = " + "[" * NEST + "]" * NEST, ValueError, ["too deeply"]),
    "deep keys": (HEAD + "level" + ".a" * 2000 + " = 1", TypeError, ["level", "a table"]),
    # Not UTF-8.
    "Latin-1": ("# \xe9\n".encode("latin-1"), ValueError, ["not UTF-8: byte 2 is 0xe9", "Save"]),
    "UTF-16": (HEAD.encode("utf-16-le") + b"\xff", ValueError, ["not UTF-8", "Save it in"]),
    "bytes": (b"\xff\xfe\x00", ValueError, ["not UTF-8: byte 0 is 0xff", "Save it in"]),
}
