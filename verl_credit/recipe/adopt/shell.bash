# bash reads this file before a script whose launch is adopted (BASH_ENV). A DEBUG trap shows each simple command to `follow.py`, and
# runs the answer: nothing, or what prepares the command, or what takes its place. Descriptors: 201 questions, 202 answers,
# 203 and 204 the two ends of a pipe with one byte, which a process takes before it asks.

__lock() { IFS= builtin read -r -N 1 -u 203 __token; }
__free() { builtin printf x >&204; builtin return "$1"; }
__send() { builtin printf '%s\0' "$#" "$@" >&201; }
__hear() { IFS= builtin read -r -d '' -u 202 __answer; }
__ask() { __lock; __send "$@"; __hear; }

# The script as bash itself prints it: one command in a line, the bodies of conditions and loops indented.
__listing() { (builtin eval "__script () {
$1
}" && builtin declare -f __script) 2>/dev/null; }

# A variable becomes a mark, and an array one element; bash's constants stay.
__mark() {
    builtin local -n __v=$1
    case ${__v@a} in
        *r*) builtin return 0 ;;
        *i*) builtin declare -g +i "$1" ;;
    esac
    [[ ${!__v[*]} =~ ^0?$ ]] || __v=()
    __v=$2
} 2> /dev/null

# A program that does not run: its words are noted; then what the answer says, which may be a shell in the words.
__program() {
    __ask program "$BASHPID" "$@"
    builtin eval "$__answer"
}

command() {
    [[ ${1-} != -p ]] || builtin shift
    "$@"
}

if [[ $- == *s* ]]; then # the script is the input, of which nothing may be missing afterwards
    IFS= builtin read -r -d '' __text
    exec 0< <(builtin printf %s "$__text")
elif [[ -z ${BASH_EXECUTION_STRING-} ]]; then
    __text=$(<"$0") 2>/dev/null
fi
__ask start "$BASHPID" "$0" "$(__listing "${BASH_EXECUTION_STRING-$__text}")"
builtin eval "$__answer"
__free 0
unset __text
set -o functrace
# With extdebug from the start on bash would look for a debugger.
trap '[[ ${FUNCNAME-} == __* || $BASH_COMMAND == __* ]] || { [[ $BASHOPTS == *extdebug* ]] || shopt -s extdebug; __ask event "$BASHPID" "$LINENO" "${BASH_SOURCE-}" "$PWD" "$BASH_COMMAND" "${FUNCNAME[@]}"; builtin eval "$__answer"; }' DEBUG
