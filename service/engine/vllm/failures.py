"""placeholder while collecting samples"""
LOG_TAIL = 65536
def explain(error, child_log, settings):
    import traceback
    print("=== ERROR CHAIN"); 
    e = error
    while e is not None:
        print(repr(e)[:1500]); e = e.__cause__ or e.__context__
    print("=== CHILD LOG"); print("\n".join(l for l in child_log[-9000:].splitlines() if not l.startswith("  ")))
    return "x"
