#!/usr/bin/env bash
# The steps of action.yml: place the model, write the report into the job summary, check limits and baseline.
# The exit code is that of `partita place`, or of `partita report check` where placing succeeded.
set -euo pipefail

words() { # INPUT TEXT: the words of a text with quotes, a line each
    [ -z "$2" ] || xargs -n 1 printf '%s\n' <<<"$2" 2>/dev/null && return
    echo "the input $1 has a quote that is not closed: $2" >&2
    exit 2
}
place_options=$(words place-options "${PLACE_OPTIONS:-}")
limits=$(words limits "${LIMITS:-}")
mapfile -t place_options < <([ -z "$place_options" ] || printf '%s\n' "$place_options")
mapfile -t limits < <([ -z "$limits" ] || printf '%s\n' "$limits")
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
