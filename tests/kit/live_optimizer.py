"""The state of a live optimiser, in the form in which a checkpoint's is read."""

from verl_credit.study.probe.update import OptimizerState, parameter_state


def optimizer_state(optimizer, named_parameters) -> OptimizerState:
    """Copied: later steps of the optimiser do not change it."""
    names = {parameter: name for name, parameter in named_parameters}
    states = {
        names[parameter]: parameter_state(optimizer.state.get(parameter, {}), group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return OptimizerState(lr=float(optimizer.param_groups[0]["lr"]), parameters=states)
