#!/bin/sh
# A script of yours: is every line of the file well formed?
set -eu
bad=$(tail -n +2 "$1" | grep -cvE '^[A-Z]-[0-9]+,[0-9]+\.[0-9]{2}$' || true)
echo "$bad bad lines in $1 (attempt $STELLWERK_ATTEMPT)"
[ "$bad" -eq 0 ]
