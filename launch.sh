#!/usr/bin/env bash
# Install once (.venv, pinned by constraints.txt), then run. Works from a fresh clone, with or without GPUs.
#
#   ./launch.sh                        install, then train: torchrun main.py --depth 8 --compile fwdbwd (without a GPU
#                                      blocks, which compiles sooner) --sample 60; ends with what to do next
#   ./launch.sh run FLAGS              the same with your flags instead (python main.py --help lists them)
#   ./launch.sh test [lab|slow|all|ARGS]   quick tests of the product; lab: quick tests of lab/; slow: the tests that those
#                                      two leave out; all: every test that needs no GPU; ARGS: pytest's arguments
#   ./launch.sh test versions [VERSION...]
#                                      tests that a version of torch may break, with versions other than the pinned one,
#                                      each installed once in .venv-VERSION; newest: the newest that pip finds
#                                      (tests/versions.py)
#   ./launch.sh sweep AXIS|all|FILE [--small] [FLAGS]
#                                      one run per setting; a second call runs what has no row yet (lab/sweeps/sweep.py)
#   ./launch.sh fit --model DIR [FLAGS]
#                                      finds the least recomputation that fits: planned, then measured (lab/fit.py)
#   ./launch.sh verify [--device cpu] [--world N] [PYTEST'S FLAGS]
#                                      runs on all GPUs of this machine the checks that were never run on several GPUs, and
#                                      writes one file to send (docs/measuring.md); --device cpu: on CPU ranks;
#                                      --world 8: on 8 simulated ranks
#   ./launch.sh gpu [PYTEST'S FLAGS]   verify on one GPU with 8 simulated ranks, and every other test that needs a GPU
#   ./launch.sh studies [--small] [--only NAME...]    one study after the other; a second call runs what is missing
#   ./launch.sh profile [FLAGS]        a run with --profile DIR; with NSYS=1 under nsys
#   ./launch.sh nodes [FLAGS]          measures links and steps to choose --mode for this network, beside predicted times
#                                      (lab/benchmarks/nodes.py); with several nodes start it on each, as run
#   ./launch.sh slurm [SLURM'S OPTIONS] [FLAGS]    prints a batch script for several nodes (lab/sweeps/slurm.py)
#   ./launch.sh install                installs and runs nothing
#
# Environment
#   NPROC          processes per node (default: one per GPU, 4 without a GPU; in a sweep at most 2, as in the reference tables)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several nodes: run the same command on each, with NODE_RANK 0, 1, ..
#                  NNODES=1:2: the run goes on with one or two nodes. Node 0 must stay; others may leave and come back. Add
#                  --save, --save-every and --effective-batch. Each departure uses one of MAX_RESTARTS (default then 9)
#   MAX_RESTARTS   how often each node restarts its ranks after a rank has ended (default 0). Set the same on all nodes.
#                  With --save and --save-every they resume from the last checkpoint, once a dead node runs its command
#                  again. If node 0 is lost, all nodes end
#   PYTHON         interpreter (default python3); NO_INSTALL=1 uses it with the packages that it has
#   TORCH          cpu | cuda: which torch to install (default: cuda where nvidia-smi lists a GPU)
#                  older driver: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 ./launch.sh install
#   OUT            folder of results (verify, gpu: runs) or traces (profile: profile)
#   SETTING_TIMEOUT   seconds for one setting of a sweep (default 1800)
#   TEST_SHARE     I/N: test runs every Nth of its files, from the Ith on
# Relative paths in FLAGS start at the repository.

set -euo pipefail
export PYTHONUTF8="${PYTHONUTF8:-1}"    # torch 2.13 cannot be imported where texts are ASCII or of some other encodings
caller=$PWD
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")"

die() { echo "launch.sh: ${1//[[:cntrl:]]/?}" >&2; exit "${2:-1}"; }  # one line that controls no terminal

case ${PYTHON:-} in /*) ;; */*) PYTHON=$caller/$PYTHON ;; esac
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
fi

install() {
    py=${PYTHON:-python3}
    command -v "$py" >/dev/null || die "$py was not found; install Python 3.11 or newer, or name an interpreter in PYTHON"
    [ -z "${NO_INSTALL:-}" ] || return 0
    "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$py is $("$py" -V 2>&1): expected Python 3.11 or newer; name an interpreter in PYTHON"
    "$py" -c 'import ensurepip, venv' 2>/dev/null || die "$py has no venv module: on Debian, apt-get install python3-venv"

    local kind=cpu hash
    [ "$gpus" -eq 0 ] || kind=cuda
    kind=${TORCH:-$kind}
    case $kind in cpu|cuda) ;; *) die "TORCH=$kind: expected cpu or cuda" 2 ;; esac
    hash="$(cat pyproject.toml constraints.txt | cksum) $PWD"
    py=$PWD/.venv/bin/python
    # The CUDA build serves a machine without a GPU too (a login node), never the other way round.
    if grep -qxF -e "$hash $kind" -e "$hash cuda" .venv/.installed 2>/dev/null; then return 0; fi

    echo "installing into .venv (torch for $kind); this takes some minutes, once" >&2
    [ ! -L .venv ] && { [ ! -e .venv ] || [ -e .venv/.installed ]; } ||
        die ".venv was not made by launch.sh, which would delete it; move it away, or use it with NO_INSTALL=1 PYTHON=.venv/bin/python"
    rm -rf .venv && mkdir .venv && echo begun > .venv/.installed  # first: it may be interrupted
    "${PYTHON:-python3}" -m venv .venv
    [ "$kind" = cuda ] || [ "$(uname)" = Darwin ] || install_cpu_torch
    "$py" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,wandb,plot,gpucode]' >&2
    echo "$hash $kind" > .venv/.installed
}

# On Linux the default torch brings gigabytes of CUDA; the CPU build carries a local version, so it can be asked for.
install_cpu_torch() {
    local torch index=
    torch=$(grep '^torch==' constraints.txt)+cpu
    "$py" -m pip install -q --dry-run --no-deps "$torch" >/dev/null 2>&1 ||
        index=--extra-index-url=https://download.pytorch.org/whl/cpu
    "$py" -m pip install -qq --disable-pip-version-check ${index:+"$index"} "$torch" >&2
}

torchrun() {    # torchrun SCRIPT ARGS; a prefix (nsys) may stand in $wrap
    local where="--standalone" word nproc=${NPROC:-$((gpus > 0 ? gpus : 4))} least most own
    local expected="NNODES=${NNODES:-}: expected a number of nodes, or a minimum and a maximum such as 1:2"
    case ${NPROC:-1} in 0*|*[!0-9]*|?????*) die "NPROC=$NPROC: expected a number of processes, at least 1" 2 ;; esac
    for word in "${@:2}"; do case $word in -h|--help) exec "$py" "$1" --help ;; esac; done
    for word in MAX_RESTARTS NODE_RANK; do
        [[ ${!word:-0} =~ ^[0-9]{1,6}$ ]] || die "$word=${!word}: expected a whole number, 0 or more" 2; done
    [[ ${MASTER_PORT:-1} =~ ^[1-9][0-9]{0,4}$ && ${MASTER_PORT:-1} -lt 65536 ]] || die "MASTER_PORT=$MASTER_PORT: expected a port from 1 to 65535" 2
    [ -z "${TORCHINDUCTOR_CACHE_DIR:-}" ] || { mkdir -p "$TORCHINDUCTOR_CACHE_DIR" && [ -w "$TORCHINDUCTOR_CACHE_DIR" ]; } 2>&- ||
        die "TORCHINDUCTOR_CACHE_DIR=$TORCHINDUCTOR_CACHE_DIR: nothing can be written there; name another folder" 2
    [[ ${NNODES:-1} =~ ^([1-9][0-9]{0,4})(:([1-9][0-9]{0,4}))?$ ]] || die "$expected" 2
    least=${BASH_REMATCH[1]} most=${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}
    [ "$least" -le "$most" ] || die "$expected" 2
    case ${NNODES:-1} in
        1|*:*) ;;
        *) [ $((10#${NODE_RANK:-0})) -lt "$most" ] || die "NODE_RANK=$NODE_RANK: expected a number below NNODES=$NNODES" 2 ;;
    esac
    # The flags must do for each number of ranks; wrong ones are one line here, before torch is imported.
    if [ "$1" = main.py ]; then "$py" -c 'import sys
from trainer.config import parse
nproc, least, most = map(int, sys.argv[1:4])
for nodes in range(least, most + 1): parse(sys.argv[4:], 0, nodes * nproc)' "$nproc" "$least" "$most" "${@:2}"
    else "$py" "$@" --check; fi || exit
    if [ "${NNODES:-1}" != 1 ]; then
        [ -n "${NODE_RANK:-}" ] || die "NNODES=$NNODES: needs NODE_RANK; set it to 0 on the first node, to 1, 2, .. on the others" 2
        [ -n "${MASTER_ADDR:-}" ] || die "NNODES=$NNODES: needs MASTER_ADDR; set it to the name or address of the first node" 2
        where="--nnodes=$NNODES --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR --master-port=${MASTER_PORT:-29500}"
        case $NNODES in *:*)
            # Torchrun numbers nodes in the order of --local-addr: the first one keeps rank 0, its results and its lock of
            # --save. The other names order the nodes and name no host.
            own=$MASTER_ADDR
            [ "$NODE_RANK" = 0 ] || own=$MASTER_ADDR.$NODE_RANK
            where="--nnodes=$NNODES --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}"
            where="$where --rdzv-conf=is_host=$((10#$NODE_RANK == 0)) --local-addr=$own --max-restarts=${MAX_RESTARTS:-9}"
            export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ;;    # else a node that comes back ends all (torch 2.13)
        esac
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PET_MAX_RESTARTS="${MAX_RESTARTS:-0}"    # the latter is torchrun's name
    # shellcheck disable=SC2086  # lists of words without spaces
    exec ${wrap:-} "$py" -m trainer.distributed.torchrun $where --nproc-per-node "$nproc" "$@"
}

profile() {
    local dir=${OUT:-profile} nsys="nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop"
    nsys="$nsys --force-overwrite=true --output=$dir/nsys"
    mkdir -p "$dir"
    [ "${NSYS:-}" != 1 ] || command -v nsys >/dev/null || die "NSYS=1: nsys is not on PATH; install Nsight Systems, or leave NSYS out" 2
    if [ "${NSYS:-}" = 1 ]; then wrap=$nsys; else echo "to record with Nsight Systems, set NSYS=1 or run: $nsys COMMAND" >&2; fi
    torchrun main.py --profile "$dir" "$@"
}

case ${1:-run} in -h|--help|help) sed -n '2,/^$/s/^# \{0,1\}//p' launch.sh; exit ;; -*) set -- run "$@" ;; esac
command=${1:-run} suite= folders=
[ $# -eq 0 ] || shift
case $command in
    install|run|test|sweep|fit|verify|gpu|nodes|studies|profile|slurm) install ;;
    *)       die "no command '$command'; ./launch.sh --help lists them" 2 ;;
esac
case $command in
    install) ;;
    run)     if [ $# -eq 0 ]; then
                 set -- --depth 8 --compile "$([ "$gpus" -gt 0 ] && echo fwdbwd || echo blocks)" --sample 60
                 export MAIN_JOB=1    # it ends with what to do next (trainer/distributed/torchrun.py)
             fi
             torchrun main.py "$@" ;;
    test)    # a suite: two files at a time, one thread each, the longest files first (tests/fixtures.py)
             [ "${1:-}" != versions ] || exec "$py" tests/versions.py "${@:2}"
             case ${1:-quick} in
                 quick) suite='not slow and not long' folders=tests ;; lab) suite='not slow' folders=lab/tests ;;
                 slow)  suite='(slow or long) and not gpu' ;;          all) suite='not gpu' ;;
             esac    # shellcheck disable=SC2086  # no folder: both
             [ -z "$suite" ] ||
                 set -- -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -m "$suite" $folders "${@:2}"
             OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$py" -m pytest "$@" ;;
    sweep)   if [ -f "$caller/${1:-}" ]; then file=$caller/$1; shift; set -- "$file" "$@"; fi
             case " $* " in *" --slurm "*) gpus=2 ;; esac    # of an array's nodes, not of this one
             export NPROC=${NPROC:-$((gpus == 1 ? 1 : 2))}
             exec "$py" -m lab.sweeps.sweep "$@" ;;
    fit)     exec "$py" -m lab.fit "$@" ;;
    verify|gpu)    # programs have limits of their own; lab/tests/verify comes first, for its flags; xunit1 has figures
             [ "$command" = verify ] || set -- tests lab/tests --world 8 "$@"
             exec "$py" -m pytest -v -rs -m gpu -o faulthandler_timeout=0 -o junit_family=xunit1 \
                 --junitxml "${OUT:-runs}/$command.xml" lab/tests/verify "$@" ;;
    nodes)   PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} torchrun lab/benchmarks/nodes.py "$@" ;;
    studies) exec "$py" -m lab.studies "$@" ;;
    profile) profile "$@" ;;
    slurm)   exec "$py" -m lab.sweeps.slurm "$@" ;;
esac
