"""Hand out the assignments and grade what comes back, with nbgrader: `make assignments` and `make grade` run this.

    python coursework.py release OUT
    python coursework.py grade SUBMISSIONS OUT [SECONDS A CELL MAY TAKE]

OUT/course is an ordinary nbgrader course: nbgrader's own tools work there, and its gradebook.db holds all scores.
"""

import csv
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor
from nbgrader.apps import NbGraderAPI
from nbgrader.preprocessors import ClearHiddenTests, GetGrades, NbGraderPreprocessor
from nbgrader.utils import is_grade, is_locked
from traitlets.config import Config

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT / "book" / "_ext"))
from book_assignments import bundle, write_if_new  # noqa: E402


class ClearTracebacks(NbGraderPreprocessor):
    """Leave out of feedback the frame of a traceback that shows hidden tests."""

    def preprocess_cell(self, cell, resources, index):
        """Go through the errors of one cell."""
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [frame for frame in output.traceback if "HIDDEN TESTS" not in frame]
        return cell, resources


def course(out, seconds=60):
    """Open the course in OUT, made where there is none."""
    # The kernel called python3 that was put there runs the book's own environment; look for no other.
    os.environ["JUPYTER_PATH"] = str(Path(sys.prefix, "share", "jupyter"))
    # nbgrader calls alembic, by its name.
    os.environ["PATH"] = str(Path(sys.prefix, "bin")) + os.pathsep + os.environ.get("PATH", "")
    config = Config()
    config.CourseDirectory.root = str(out / "course")
    config.CourseDirectory.feedback_directory = str(out / "feedback")
    # The course's own cells, imports say, may take long on a busy machine; that is no fault of the student's.
    config.Execute.timeout_func = lambda cell: seconds if is_grade(cell) or not is_locked(cell) else 600
    config.Execute.iopub_timeout = config.Execute.startup_timeout = 120
    config.Execute.extra_arguments = ["--IPKernelApp.log_level=40", "--HistoryManager.hist_file=:memory:"]
    config.OverwriteCells.add_missing_cells = True
    config.GenerateFeedback.preprocessors = [GetGrades, ClearHiddenTests, ClearTracebacks, CSSHTMLHeaderPreprocessor]
    config.NbGraderAPI.log_level = "ERROR"
    (out / "course").mkdir(parents=True, exist_ok=True)
    return NbGraderAPI(config=config)


def check(result, what):
    """Stop where nbgrader failed."""
    if not result["success"]:
        raise SystemExit(f"{what}:\n{result.get('log', '')}\n{result.get('error', '')}")


def release(api, out):
    """Take the masters into the course where they have changed; return the names of all, and of those that have."""
    names, changed = [], set()
    for master in sorted(HERE.glob("*.ipynb")):
        names.append(name := master.stem)
        target = out / "course" / "source" / name / f"{name}.ipynb"
        done = out / "course" / "release" / name / f"{name}.ipynb"
        if write_if_new(target, master.read_bytes()) or not done.exists():
            result = api.generate_assignment(name)
            if not result["success"]:
                target.unlink()  # so that the next run tries again
            check(result, f"{name} could not be released")
            changed.add(name)
    return names, changed


def pack(out, names):
    """Write OUT/NAME.zip for every assignment."""
    for name in names:
        notebook = nbformat.read(out / "course" / "release" / name / f"{name}.ipynb", 4)
        write_if_new(out / f"{name}.zip", bundle(ROOT, name, notebook))
        print(out / f"{name}.zip")


def collect(student, names):
    """Return the notebook handed in for each assignment, and what is wrong with the student's folder."""
    found, notes = {}, []
    for path in sorted(student.rglob("*.ipynb")):
        place = path.relative_to(student)
        if not any(part.startswith((".", "__MACOSX")) for part in place.parts):
            name = next((name for name in names if path.stem.startswith(name)), None)
            if name is None:
                notes.append(f"{place} is no assignment")
            elif name in found:
                notes.append(f"{found[name].relative_to(student)} was graded, {place} was not")
            else:
                found[name] = path
    return found, notes


def grade(api, out, submissions):
    """Grade every notebook that is new or changed, and write feedback, grades.csv and tasks.csv."""
    names, changed = release(api, out)
    students = sorted(p for p in submissions.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    handed_in = {student.name: collect(student, names) for student in students}
    wanted = [name for name in names if any(name in found for found, _ in handed_in.values())]
    if not wanted:
        raise SystemExit(f"{submissions} must hold STUDENT/{names[0]}.ipynb or the like; no such notebook is there")
    totals, tasks = [], []
    for student, (found, notes) in handed_in.items():
        for name in wanted:
            note = list(notes) if name in found else ["not handed in", *notes]
            graded = out / "course" / "autograded" / student / name / f"{name}.ipynb"
            if name in found:
                target = out / "course" / "submitted" / student / name / f"{name}.ipynb"
                if write_if_new(target, found[name].read_bytes()) or name in changed or not graded.exists():
                    print(f"grading {name} of {student} ...", flush=True)
                    if not (result := api.autograde(name, student))["success"]:
                        shutil.rmtree(graded.parent, ignore_errors=True)
                        note.insert(0, f"not graded: {reason(result)}")
                if graded.exists():
                    check(api.generate_feedback(name, student), f"no feedback on {name} for {student}")
            rows = scores(api, name, student, graded.exists())
            tasks += [[student, name, *row] for row in rows]
            totals.append([student, name, *summary(rows), "; ".join(note)])
    columns = [
        "automatic",
        "automatic of",
        "by hand",
        "by hand of",
        "total",
        "total of",
        "still to grade by hand",
        "note",
    ]
    write(out / "grades.csv", ["student", "assignment", *columns], totals)
    write(out / "tasks.csv", ["student", "assignment", "task", "graded", "score", "of", "still to grade"], tasks)
    print(f"\n{out / 'grades.csv'}\n{out / 'tasks.csv'}\n{out / 'feedback'}")


def reason(result):
    """Return the last error in the log that is not about another one."""
    errors = [
        line.strip() for line in result.get("log", "").splitlines() if re.match(r"\s*[\w.]+(Error|Exception)\b", line)
    ]
    return errors[-1] if errors else "nbgrader gave no reason"


def scores(api, name, student, graded):
    """Return task, kind, score, points, and yes where a look by hand is still due, of every task."""
    with api.gradebook as book:
        notebook, given = book.find_notebook(name, name), {}
        if graded:
            given = {grade.name: grade for grade in book.find_submission_notebook(name, name, student).grades}
        by_hand = {cell.name for cell in notebook.solution_cells}
        rows = []
        for cell in notebook.grade_cells:
            one = given.get(cell.name)
            kind, due = "by hand" if cell.name in by_hand else "automatic", bool(one and one.needs_manual_grade)
            rows.append([cell.name, kind, one.score if one else 0.0, cell.max_score, "yes" if due else ""])
        return rows


def summary(rows):
    """Return points and maximum of the automatic tasks, of those by hand and of all, and how many are still open."""
    sums = []
    for kinds in (["automatic"], ["by hand"], ["automatic", "by hand"]):
        part = [row for row in rows if row[1] in kinds]
        sums += [sum(row[2] for row in part), sum(row[3] for row in part)]
    return [*sums, sum(row[4] == "yes" for row in rows)]


def write(path, header, rows):
    """Write a table that spreadsheets open: with the mark by which they know UTF-8, for names such as Jürgen."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([header, *rows])


def main(task, *arguments):
    """Do what the command line says."""
    count = {"release": 1, "grade": 2}[task]  # by place: a folder may be called 1
    *folders, out = [Path(argument).expanduser().resolve() for argument in arguments[:count]]
    api = course(out, *map(int, arguments[count:]))
    if task == "release":
        pack(out, release(api, out)[0])
    elif not folders[0].is_dir():
        raise SystemExit(f"SUBMISSIONS must be a folder with one folder a student in it, got {folders[0]}")
    else:
        grade(api, out, folders[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
