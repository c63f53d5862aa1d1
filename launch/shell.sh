# What every script of launch begins with: it sources this file behind its first comment, which is its help.
#
# --help and wrong arguments are answered here, from that comment and from the options in the program's source: no
# environment is built, and nothing but bash and python3 is asked. Ctrl-C ends a script with one line and status 130.
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)"
name="$(basename "$(readlink -f "${BASH_SOURCE[1]}")")"
trap 'printf "\nlaunch/%s: interrupted\n" "$name" >&2; exit 130' INT

# read_arguments PROGRAM ARGUMENT...: prints the help if an argument before -- asks for it, and ends the script if PROGRAM
# does not take one; PROGRAM is a file of the checkout, or "" where arguments go to another tool, which has its own help
# behind the first of them.
read_arguments() {
    local program="$1" argument
    shift
    [[ -n "$program" ]] || set -- "${@:1:1}"
    for argument in "$@"; do
        [[ "$argument" != -- ]] || break
        [[ "$argument" == -h || "$argument" == --help ]] || continue
        sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$root/launch/$name"
        ask_options help "$program"
        exit 0
    done
    ask_options check "$program" "$@" || exit
}

# ask_options WHAT PROGRAM ARGUMENT...: what launch/programs/options.py says, where there is a python3 to run it. On
# Ctrl-C this script speaks, and not Python with a traceback.
ask_options() {
    local what="$1" program="$2"
    shift 2
    [[ -n "$program" ]] && command -v python3 >/dev/null || return 0
    (
        trap '' INT
        PYTHONIOENCODING=:backslashreplace python3 "$root/launch/programs/options.py" "$what" "launch/$name" "$root/$program" "$@"
    )
}

# require_gpu: ends the script, before anything is built, on a machine without an NVIDIA GPU.
require_gpu() {
    if [[ "${CUDA_VISIBLE_DEVICES-all}" == "" || "${CUDA_VISIBLE_DEVICES-all}" == -1 ]]; then
        printf 'launch/%s: needs an NVIDIA GPU, and CUDA_VISIBLE_DEVICES hides all; unset it\n' "$name" >&2
        exit 2
    fi
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ -e /dev/dxg ]] || nvidia-smi -L 2>/dev/null | grep -q ^GPU || {
        printf 'launch/%s: needs an NVIDIA GPU, found none (no /dev/nvidia0, none that nvidia-smi lists); run it on a machine with one\n' "$name" >&2
        exit 2
    }
}

# start PROGRAM ARGUMENT...: runs a file below the checkout in the pinned environment, or with $PYTHON.
start() {
    local python="${PYTHON:-}"
    if [[ -z "$python" ]]; then
        python="$("$root/launch/environment")/bin/python"
    fi
    PYTHONPATH="$root/launch:$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/launch/programs/run.py" "$@"
}
