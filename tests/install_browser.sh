#!/bin/sh
# The report is looked at in a real browser. Install one where we may; else those tests say that they skip.
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium for the report's tests"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null && exit 0
fi
echo "no chromium: the report's browser tests will be skipped; to run them: sudo apt install chromium"
