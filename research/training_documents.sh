#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a folder of English text from Debian's packages, to train `tessera adapt` on; of a dictionary, the beginning.
#
#   sh research/training_documents.sh build/documents        # as root: installs html2text
set -eu

folder=${1:?usage: sh research/training_documents.sh FOLDER}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"

apt-get install -y -qq html2text >"$work/log"
(cd "$work" && apt-get download -qq dict-foldoc dict-jargon dict-elements debian-handbook)
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/unpacked"
done
for dictionary in "$work"/unpacked/usr/share/dictd/*.dict.dz; do
    zcat "$dictionary" | iconv -c -f utf-8 -t utf-8 | head -c 200000 >"$folder/$(basename "$dictionary" .dict.dz).txt" || true
done
for page in "$work"/unpacked/usr/share/doc/debian-handbook/html/en-US/*.html; do
    html2text -utf8 "$page" >"$folder/$(basename "$page" .html).txt"
done
echo "$(find "$folder" -name '*.txt' | wc -l) files in $folder"
