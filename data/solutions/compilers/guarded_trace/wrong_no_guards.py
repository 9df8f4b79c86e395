# The notebook's tracer: the path of the example for all arguments.
# says: branch on data: the example, another path, the example again: wrong
import torch


class Recorded(torch.Tensor):
    @classmethod
    def __torch_function__(cls, operation, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = operation(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            return result
        inputs = torch.fx.node.map_aggregate((args, kwargs or {}), lambda v: getattr(v, "node", v))
        return recorded(result, cls.graph.call_function(operation, *inputs))


def recorded(tensor, node):
    tensor = tensor.as_subclass(Recorded)
    tensor.node = node
    return tensor


def guarded_trace(fn, example):
    Recorded.graph = graph = torch.fx.Graph()
    inputs = [recorded(x.clone(), graph.placeholder(f"x{at}")) for at, x in enumerate(example)]
    result = fn(*inputs)
    graph.output(getattr(result, "node", result))
    return torch.fx.GraphModule({}, graph)
