# says: write it without
from helpers.profiling import ModuleProfiler


class MyProfiler(ModuleProfiler):
    def __exit__(self, *exception):
        self.step()
        super().__exit__(*exception)

    def times(self):
        table = self.summary()
        return {n.partition(".")[2]: (f, b) for n, f, b in zip(table.module, table.forward_ms, table.backward_ms)}
