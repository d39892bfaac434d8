#!/usr/bin/env bash
# Pin the images that docker-compose.yml names under `x-images`, each to the digest that its tag has now. Run it again
# after changing a tag, or to take a newer build of one. Needs docker with buildx, and the registries.
#
#   deploy/pin-images.sh [FILE]
set -euo pipefail
file=${1:-$(dirname "$0")/../docker-compose.yml}

in_images=false
pinned=""
while IFS= read -r line || [[ -n $line ]]; do
    if [[ $line =~ ^[^[:space:]#] ]]; then
        if [[ $line == x-images: ]]; then in_images=true; else in_images=false; fi
    elif $in_images && [[ $line =~ ^(\ +[a-z-]+:\ \&[a-z-]+\ )([^@[:space:]]+)(@sha256:[0-9a-f]+)?(.*)$ ]]; then
        before=${BASH_REMATCH[1]} image=${BASH_REMATCH[2]} after=${BASH_REMATCH[4]}
        digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
        if [[ ! $digest =~ ^sha256:[0-9a-f]{64}$ ]]; then
            echo "pin-images.sh: docker gave no digest for $image but '$digest'; nothing is changed" >&2
            exit 1
        fi
        echo "$image $digest" >&2
        line=$before$image@$digest$after
    fi
    pinned+=$line$'\n'
done < "$file"
printf '%s' "$pinned" > "$file"
