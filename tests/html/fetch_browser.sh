#!/usr/bin/env bash
# Fetches a headless Chromium for the tests of the reports into FOLDER: Debian's package and the libraries that this
# machine lacks, unpacked. Nothing is installed and root is not needed; 115 MB are downloaded.
#
#   bash tests/html/fetch_browser.sh FOLDER
set -euo pipefail
folder=$1
program=$folder/usr/lib/chromium/chromium-headless-shell
[ -x "$program" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "This is no Debian; name a browser in CHROMIUM." >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/unpacked"
# Package lists and cache of its own, so that the machine's stay as they are.
apt=(apt-get -qq -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)"
    -o Debug::NoLocking=1)
"${apt[@]}" update
mapfile -t packages < <("${apt[@]}" --simulate --no-install-recommends --reinstall install chromium-headless-shell \
    | awk '/^Inst /{print $2}')
[ "${#packages[@]}" -gt 0 ] || { echo "There is no package chromium-headless-shell here." >&2; exit 1; }
# The parts of the browser itself are wanted even where the machine has them: one folder holds all of it.
mapfile -t packages < <(printf '%s\n' "${packages[@]}" chromium-headless-shell chromium-common | sort -u)
(cd "$work" && "${apt[@]}" download "${packages[@]}")
for package in "$work"/*.deb; do
    dpkg -x "$package" "$work/unpacked"
done
mkdir -p "$(dirname "$folder")"
rm -rf "$folder"
mv "$work/unpacked" "$folder"
[ -x "$program" ]
