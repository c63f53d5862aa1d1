# What every script of launch begins with: it sources this file behind its first comment, which is its help.
#
# --help is answered here, from that comment and from the options in the program's source: no environment is built, and
# nothing but bash and python3 is asked. Ctrl-C ends a script with one line and status 130.
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)"
name="$(basename "$(readlink -f "${BASH_SOURCE[1]}")")"
trap 'printf "\nlaunch/%s: interrupted\n" "$name" >&2; exit 130' INT

# help_or PROGRAM ARGUMENT...: prints the help if the first argument asks for it; PROGRAM is a file below launch, or "".
help_or() {
    local program="$1"
    [[ "${2:-}" == -h || "${2:-}" == --help ]] || return 0
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$root/launch/$name"
    if [[ -n "$program" ]] && command -v python3 >/dev/null; then
        printf '\noptions:\n'
        printf '  %s\n' "-h, --help"
        PYTHONIOENCODING=:backslashreplace python3 "$root/launch/programs/options.py" "$root/$program"
    fi
    exit 0
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
