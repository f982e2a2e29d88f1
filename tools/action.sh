#!/usr/bin/env bash
# The steps of action.yml: place the model, write the report into the job summary, check limits and baseline.
# The exit code is that of `partita place`, or of `partita report check` where placing succeeded.
set -euo pipefail

words() { # the words of a text with quotes, a line each
    [ -z "$1" ] || xargs -n 1 printf '%s\n' <<<"$1"
}
mapfile -t place_options < <(words "${PLACE_OPTIONS:-}")
mapfile -t limits < <(words "${LIMITS:-}")
[ -z "${BASELINE:-}" ] || limits+=(--baseline "$BASELINE")

if [ -n "${BASELINE:-}" ] && [ "$BASELINE" -ef "$REPORT" ]; then
    echo "the baseline is the file that the report is written to: $REPORT; give one of them another name" >&2
    exit 2
fi
rm -f "$REPORT"
code=0
partita place "$MODEL" --provider "$PROVIDER" "${place_options[@]}" --report "$REPORT" || code=$?
if [ -e "$REPORT" ]; then
    partita report markdown "$REPORT" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
    if [ "$code" -eq 0 ] && [ "${#limits[@]}" -gt 0 ]; then
        partita report check "$REPORT" "${limits[@]}" || code=$?
    fi
fi
exit "$code"
