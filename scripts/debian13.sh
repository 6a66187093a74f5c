# Sourced: programs of Debian 13 beside whatever Debian this is.

# The mirror that this machine uses already; the suites with a dash in their names are additions to it.
debian_mirror() {
    apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's/^[a-z]* \(.*debian\/\?\)$/\1/p' | head -n 1
}

# unpack_debian13 PACKAGE FOLDER: the package's files into FOLDER, from package lists of its own, so
# that apt knows nothing of it.
unpack_debian13() {
    local package=$1 folder=$2 keys=/usr/share/keyrings/debian-archive-keyring.gpg mirror
    mirror=$(debian_mirror) || true
    [[ -n $mirror && -r $keys ]] || return 1
    rm -rf "$folder"
    mkdir -p "$folder"/apt/{lists,archives}/partial
    folder=$(realpath "$folder")
    printf 'deb [signed-by=%s] %s trixie main\n' "$keys" "$mirror" >"$folder/apt/sources.list"
    local apart=(-q -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
                 -o "Dir::State::Lists=$folder/apt/lists" -o Dir::State::Status=/dev/null
                 -o "Dir::Cache=$folder/apt" -o APT::Sandbox::User=root)
    apt-get "${apart[@]}" update &&
        (cd "$folder" && apt-get "${apart[@]}" download "$package") &&
        dpkg -x "$folder/${package}"_*.deb "$folder" &&
        rm -rf "$folder/apt" "$folder"/*.deb
}
