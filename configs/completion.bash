# Completes `python -m project.COMMAND --option` with the Tab key, in bash and (through bashcompinit) in zsh.
#   source configs/completion.bash
# The options are those of --help, asked for once per shell and command. jsonargparse's own generator (shtab) walks through
# every network that could be given and does not come back.
declare -gA _project_options

_project_complete() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} module="" index
  COMPREPLY=()
  for ((index = 1; index < COMP_CWORD - 1; index++)); do
    [[ ${COMP_WORDS[index]} == -m ]] && module=${COMP_WORDS[index + 1]}
  done
  if [[ $previous == -m && -d project/ ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(grep -l '^if __name__ == ' project/*.py 2>/dev/null |
      sed -E 's#(/__main__)?\.py$##; s#/#.#g')" -- "$current")
  elif [[ $module == project.* && $current == -* ]]; then
    if [[ -z ${_project_options[$module]:-} ]]; then
      _project_options[$module]=$(for help in --help --data.help --model.help; do
        "${COMP_WORDS[0]}" -m "$module" "$help" 2>/dev/null
      done | grep -oE -- '--[a-z_][a-z_.]*' | sort -u)
    fi
    mapfile -t COMPREPLY < <(compgen -W "${_project_options[$module]}" -- "$current")
  fi
}
complete -o default -F _project_complete python python3
