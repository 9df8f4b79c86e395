#!/bin/bash
# bash go check | bash go SECONDS [CHAPTER/TABLE ...] [--dry-run]: on the GPU's machine, the seconds from here on.
# Records come as results.tgz into $OUT, else into this folder.
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$here/wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$here"/wheels/*.whl || exit 1
fi
cd "$here/project" || exit 1
export PYTHONPATH="$site:$here/project" PYTHONUNBUFFERED=1
if [ -d "$here/text" ]; then export HELPERS_WIKITEXT="$here/text"; fi
if [ "$1" = check ]; then
  if python3 -c "import xdist" 2>/dev/null; then beside="-n 4"; fi
  python3 -m pytest -v -p no:cacheprovider $beside tests/gpu >"$out/tests_gpu.txt" 2>&1 &
  python3 -m helpers measure --check; rc=$?
  wait $! || rc=1
  grep -E "FAILED|ERROR| passed" "$out/tests_gpu.txt"
  exit $rc
else
  trap 'tar czf "$out/results.tgz" -C data results; rm -rf "$site"' EXIT
  left=$(($1 - SECONDS))  # installing took some
  timeout $((left + 20)) python3 -m helpers measure --seconds $left "${@:2}"
fi
