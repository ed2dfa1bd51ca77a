# The project's verbs. `just` is `pip install rust-just`; without it, `python3.11 dev.py VERB` does the same.

python := `command -v python3.11 || command -v python3`

# list the verbs
default:
    @just --list

# make .venv and install everything
setup:
    {{python}} dev.py setup

# a daemon with one ready instance of the real all-MiniLM-L6-v2
run *args:
    {{python}} dev.py run {{args}}

# the tests, or the part that the arguments name
test *args:
    {{python}} dev.py test {{args}}

# format, lint, types, import layers, freshness of generated code
check:
    {{python}} dev.py check

# format and safe fixes
fix:
    {{python}} dev.py fix

# regenerate src/teimgr/wire/pb from proto/
proto:
    {{python}} dev.py proto

# the documents' site in build/site; `docs serve` shows it while it is edited
docs *args:
    {{python}} dev.py docs {{args}}

# one named benchmark; `bench --help` lists them
bench name *args:
    {{python}} dev.py bench {{name}} {{args}}

# GPU tests and the GPU benchmark, on a machine with a CUDA device
gpu *args:
    {{python}} dev.py gpu {{args}}

# the C library for 64-bit Arm, under an emulator; `arm FOLDER` leaves its wheel there
arm *args:
    {{python}} dev.py arm {{args}}

# 1,000 random faults under load; or `soak saturation`, `soak overload`, `soak fleet`, `soak fuzz`
soak *args:
    {{python}} dev.py soak {{args}}

# bandit, pip-audit, and a bill of materials in sbom.json
audit *args:
    {{python}} dev.py audit {{args}}
