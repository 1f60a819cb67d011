"""What exported cells offer, read from their text: headings, signatures, descriptions, folded sources as Markdown."""
import ast
import io
import re
import tokenize
from functools import cache

from nbformat import v4

def comments(source):
    "Line number -> comment at its end."
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in found if token.type == tokenize.COMMENT}


def parameters(function):
    "(name with stars, argument, default) of a function's parameters in order, with the bare star that separates."
    of = function.args
    plain = of.posonlyargs + of.args
    defaults = [None]*(len(plain) - len(of.defaults)) + of.defaults
    found = [("", argument, default) for argument, default in zip(plain, defaults)]
    if of.vararg: found.append(("*", of.vararg, None))
    elif of.kwonlyargs: found.append(("*", None, None))
    found += [("", argument, default) for argument, default in zip(of.kwonlyargs, of.kw_defaults)]
    return found + ([("**", of.kwarg, None)] if of.kwarg else [])


def kind_of(argument):
    "(type, help) of an argument: `Annotated[type, typer.Option(help=...)]` has both."
    inside = getattr(getattr(argument.annotation, "slice", None), "elts", [])
    if not inside or ast.unparse(argument.annotation.value) != "Annotated":
        return ast.unparse(argument.annotation) if argument.annotation else "", ""
    help = next((word.value.value for call in inside[1:] if isinstance(call, ast.Call) for word in call.keywords
                 if word.arg == "help" and isinstance(word.value, ast.Constant)), "")
    return ast.unparse(inside[0]), help


def as_written(star, argument, default):
    "One parameter of a signature."
    if argument is None: return star
    kind = f": {kind_of(argument)[0]}" if argument.annotation else ""
    equals = " = " if kind else "="
    return f"{star}{argument.arg}{kind}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")


def signature(name, function, method):
    "A signature as a block of code, a parameter a line where it is long."
    inside = [as_written(*parameter) for parameter in parameters(function)][int(method):]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    line = f"{name}({', '.join(inside)}){returns}"
    if len(line) > 78: line = f"{name}(\n" + "".join(f"    {one},\n" for one in inside) + f"){returns}"
    return f"```python\n{line}\n```"


def sections(node):
    "A docstring as (text, {parameter: description}, what is returned, {exception: when})."
    text, *rest = re.split(r"^(Args|Returns|Raises):$", ast.get_docstring(node) or "", flags=re.M)
    inside = dict(zip(rest[::2], rest[1::2]))
    def entries(title):
        found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inside.get(title, ""), flags=re.M)
        return {name: " ".join(about.split()) for name, about in found}
    return text.strip(), entries("Args"), " ".join(inside.get("Returns", "").split()), entries("Raises")


def told(function, notes, owner=None):
    "[(name, description)] of parameters and of what is returned; `owner`: the class, whose docstring has its own."
    header = range(function.lineno, max(function.lineno, function.body[0].lineno - 1) + 1)
    of = {star + argument.arg: (default or argument).end_lineno for star, argument, default in parameters(function)
          if argument is not None}
    def describes_the_result(line):
        alone = line == header[-1] and (function.returns or len(header) == 1)
        return line in notes and (line not in of.values() or alone)
    last = next(filter(describes_the_result, reversed(header)), None)
    last_on = {line: name for name, line in of.items()} # a comment belongs to the last parameter of its line
    rows = {name: notes[line] for line, name in last_on.items() if line in notes and line != last}
    rows |= {star + argument.arg: kind_of(argument)[1] for star, argument, _ in parameters(function)
             if argument is not None and kind_of(argument)[1]}
    back = []
    for part in re.split(r";\s+(?=\w+: )", notes.get(last, "")): # def f(x, y) -> int: # x: this; y: that
        name, colon, text = part.partition(": ")
        if colon and name in of: rows[name] = text
        elif part: back.append(part.removeprefix("->").strip())
    _, described_there, result, raised = sections(owner or function)
    rows |= {name: described_there[name.lstrip("*")] for name in of if name.lstrip("*") in described_there}
    if result: back.append(result)
    kind = f"`{ast.unparse(function.returns)}` " if function.returns else ""
    back = [("returns", kind + "; ".join(back))] if back else []
    return [*((name, rows[name]) for name in of if name in rows), *back,
            *(("raises", f"`{name}` {about}") for name, about in raised.items())]


BAR = r"\|" # in a table


def escaped(text, table=False, stars=False):
    "A docstring or comment as Markdown that shows what was written; with `stars`, asterisks make italics."
    parts = re.split(r"(`[^`]*`)", text)
    plain = lambda part: re.sub(r"([$\\])" if stars else r"([$*\\])", r"\\\1", part).replace("<", "&lt;")
    shown = "".join(part if part.startswith("`") else plain(part) for part in parts)
    return shown.replace("|", BAR) if table else shown


def div(kind, rows):
    "A table of two columns without a header, in a div of a class."
    return "\n".join([f"::: {{.{kind}}}", "| | |", "|---|---|", *[f"| {left} | {right} |" for left, right in rows],
                      ":::"])


def table(rows):
    "Names and their descriptions."
    if not rows: return ""
    named = lambda name: name if name in ("returns", "raises") else f"`{name}`"
    return div("parameters", [(named(name), escaped(note, table=True)) for name, note in rows])


def field_told(field, notes):
    "(`type = default`, description) of a field; `setting(default, help, source)` of the recipes has it as arguments."
    if not isinstance(field.value, ast.Call) or ast.unparse(field.value.func) != "setting":
        return ast.unparse(field).partition(": ")[2], notes.get(field.end_lineno, "")
    default, *words = field.value.args
    kind = f"{ast.unparse(field.annotation)} = {ast.unparse(default)}"
    help, *source = [str(word.value) for word in words[:2] if isinstance(word, ast.Constant)] or [""]
    return kind, " ".join([help, *(f"*{one}*" for one in source)])


def fields(node, notes):
    "The fields of a dataclass with types, defaults and descriptions."
    rows = []
    for field in node.body:
        if not isinstance(field, ast.AnnAssign): continue
        kind, note = field_told(field, notes)
        rows.append((f"`{field.target.id}`", f"`{kind.replace('|', BAR)}`" + "<br>"*bool(note)
                     + escaped(note, table=True, stars=True)))
    return [div("parameters", rows)] if rows else []


def methods(node):
    "The methods of a class, without the second halves of properties and without overloads."
    if not isinstance(node, ast.ClassDef): return []
    other = lambda one: ast.unparse(one).endswith((".setter", "overload"))
    return [part for part in node.body if isinstance(part, ast.FunctionDef)
            and not any(map(other, part.decorator_list))]


def inherited(node, internal):
    "(method, comments) of the internal classes of the notebook that a class is built on, the nearest first."
    for base in getattr(node, "bases", []):
        if ast.unparse(base) not in internal: continue
        above, notes = internal[ast.unparse(base)]
        yield from ((part, notes) for part in methods(above) if not part.name.startswith("_"))
        yield from inherited(above, internal)


def internal_classes(notebook):
    "Name -> (class, comments) of what `exporti` cells define."
    cells = [directives(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    sources = [code for asked, code in cells if "exporti" in asked]
    return {node.name: (node, comments(code)) for code in sources for node in ast.parse(code).body
            if isinstance(node, ast.ClassDef)}


def described(node, module, notes, owner="", internal={}):
    "Blocks of Markdown for one function, class or method."
    name = f"{owner}.{node.name}" if owner else node.name
    blocks = [f"{'####' if owner else '###'} `{node.name}`{{.nolink}} {{#{module}.{name}}}"]
    functions = methods(node)
    made = next((part for part in functions if part.name == "__init__"), None)
    kinds = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
    if isinstance(node, ast.ClassDef): blocks += [signature(name, made, True)] if made else fields(node, notes)
    elif "property" in kinds: blocks.append(f"```python\n{name}  # property\n```")
    else: blocks.append(signature(name, node, bool(owner) and "staticmethod" not in kinds))
    if text := sections(node)[0]: blocks.insert(1, escaped(text))
    if function := made or (node if not isinstance(node, ast.ClassDef) else None):
        blocks.append(table(told(function, notes, node if made else None)))
    for part in functions:
        if not part.name.startswith("_"): blocks += described(part, module, notes, node.name)
    for part, its_notes in inherited(node, internal): blocks += described(part, module, its_notes, node.name)
    return blocks


def public(tree):
    "The names that the statements of a cell define: (name, node)."
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): yield node.name, node
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in getattr(target, "elts", [target]): # not AnchorEmbedder.encode = ...
                    if isinstance(part, ast.Name): yield part.id, node


def api(source, module, internal={}):
    "An exported cell as Markdown: what it offers, also from `internal_classes`, and its source folded below."
    tree = ast.parse(source)
    if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body): return ""
    notes, blocks = comments(source), []
    constants = [name for name, node in public(tree) if isinstance(node, ast.Assign) and not name.startswith("_")]
    if constants: blocks.append("".join(f'<span id="{module}.{name}"></span>' for name in constants))
    defined = [node for name, node in public(tree) if not isinstance(node, ast.Assign) and not name.startswith("_")]
    for node in defined: blocks += described(node, module, notes, internal=internal)
    return "\n\n".join([*filter(None, blocks), folded(source, module, "Source" if defined else "")])


def folded(source, module, title):
    "A cell's source as a block that folds out under a title; without one, it is open."
    if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body): return ""
    fence = "`"*max(3, 1 + max(map(len, re.findall("`+", source)), default=0))
    summary = f'.cell-code code-fold="true" code-summary="{title}, anchor_nb/{module.replace(".", "/")}.py"'
    kind = f"{{.python {summary}}}" if title else "{.python}"
    return f"{fence}{kind}\n{source}\n{fence}"


@cache
def read(path):
    "A notebook, without the validation that nbformat.read spends most of its time on."
    return v4.reads(path.read_text(encoding="utf-8"))


def module_of(notebook):
    "The module that a notebook exports, or nothing."
    found = (re.match(r"#\|\s*default_exp\s+(\S+)", cell.source) for cell in notebook.cells if cell.cell_type == "code")
    return next((match[1] for match in found if match), "")


def directives(source):
    "The directives of a cell, name -> value, and its code without them."
    lines = source.splitlines()
    found = [re.match(r"#\|\s*([\w-]+)\s*:?\s*(.*)", line) for line in lines]
    return {match[1]: match[2] for match in found if match}, "\n".join(line for line, match in zip(lines, found)
                                                                       if not match).strip("\n")


def names(pages):
    "(module, name, first line of its docstring, notebook) of everything public, wing by wing."
    for path in pages:
        notebook = read(path)
        if not (module := module_of(notebook)): continue
        internal = internal_classes(notebook)
        for cell in notebook.cells:
            told_, code = directives(cell.source) if cell.cell_type == "code" else ({}, "")
            if "export" not in told_: continue
            for name, node in public(ast.parse(code)):
                if name.startswith("_"): continue
                text = "" if isinstance(node, ast.Assign) else ast.get_docstring(node) or ""
                yield module, name, text.partition("\n")[0], path
                for part in [*methods(node), *(part for part, _ in inherited(node, internal))]:
                    if not part.name.startswith("_") and (text := ast.get_docstring(part)): # else it overrides one
                        yield module, f"{name}.{part.name}", text.partition("\n")[0], path


def symbols(found, pages):
    "Name in backticks -> address, for names that mean one thing; and module.name for all."
    whole = {f"{module}.{name}": f"/{pages[path]}.html#{module}.{name}" for module, name, _, path in found}
    short = [name for _, name, _, _ in found]
    return whole | {name: whole[f"{module}.{name}"] for module, name, _, _ in found if short.count(name) == 1}


def names_page(public, pages, first):
    "Everything public on one page, by module; at the top the names that `anchor_nb` itself offers."
    lines = ["---", "title: API", "description: Everything public, by module, in the order in which modules "
             "build on each other", "search: false", "---", ""]
    def row(module, name, text, path, shown):
        return f"[`{shown}`](/{pages[path]}.ipynb#{module}.{name})", escaped(text, table=True)
    offered = [row(module, name, text, path, name) for wanted, home in first.items()
               for module, name, text, path in public if (module, name) == (home, wanted)]
    lines += ["## From `anchor_nb` itself {#anchor_nb}", "", "What most programs need: "
              "`from anchor_nb import AnchorEmbedder`. Each is loaded when it is first asked for.", "",
              div("names", offered)]
    modules = {}
    for module, name, text, path in public:
        modules.setdefault((module, path), []).append(row(module, name, text, path, name))
    for (module, path), rows in modules.items():
        lines += ["", f"## [anchor_nb.{module}](/{pages[path]}.ipynb) {{#{module}}}", "", div("names", rows)]
    return "\n".join(lines) + "\n"
