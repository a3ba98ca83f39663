#!/usr/bin/env python3
"""Checks what README, guides and other pages show beside the programs that check.py runs, by the programs themselves:

- each ```sh block has its output behind it, with which check.py compares;
- each other command, in an indented block or in a line: its words are parsed by the program, in an empty folder. What it says of
  missing files is right; what it says of its command line is an error of the page. Of scripts the flags are looked up. What is
  not run here is in NOT_RUN, with the reason.
- each example of a configuration in JSON: `plan` reads it. An example of a section must be right where it is written, at the top.
- each flag that a line names: a program or script has it, or it is in OTHERS.
- each Python block compiles.

    examples.py ROOT PROGRAMS_FOLDER"""
import os, pathlib, re, shlex, subprocess, sys, tempfile, unittest
import json
PROGRAMS = os.path.abspath(sys.argv.pop(2))
ROOT = pathlib.Path(os.path.abspath(sys.argv.pop(1)))
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(ROOT.glob('docs/*.md')), *sorted(ROOT.glob('docs/guide/*.md'))]
OURS = ['rzrun', 'train_lm', 'tokenize', 'generate', 'checkpoint', 'plan', 'report', 'tune', 'doctor', 'topology', 'lower_bound_bench', 'overlap_bench',
        'concurrent_bench', *(f'{c}_perf' for c in ('all_reduce', 'reduce_scatter', 'all_gather', 'broadcast', 'reduce', 'alltoall', 'alltoallv', 'scatter',
                                                    'gather', 'sendrecv'))]

# Commands of which no word is parsed here, and why.
NOT_RUN = {
    'tensor_parallel_bench': 'has no flags: the words are in bench/tensor_parallel_bench.cpp',
    'generate_bench': 'has no flags: the words are in bench/generate_bench.cpp',
    'srun': 'needs Slurm: guide.several_hosts has one', 'docker': 'needs a container runtime', 'kubectl': 'needs a cluster',
    'g++': 'tests/consumer compiles with pkg-config', 'cmake': 'builds this project', 'ctest': 'runs all tests', 'export': 'of the shell', 'printf': 'of the shell',
    'umask': 'of the shell', 'python3': 'a script of the page, which is compiled here', 'setup.sh': 'installs packages', 'test.sh': 'runs all tests',
    'build.sh': 'tests/tools/build_test.sh runs it', 'run': '.ci/run: what runs this test', 'apt-get': 'installs packages: tests/tools/features_test.sh compares them with setup.sh',
    'comm_collectives_test': 'a program of tests',
}
# Lines of indented blocks that are no commands.
TEXT = re.compile(r'# |find_package|target_link_libraries|const |rank 0 waits|10\.0\.0\.7|~/|all_reduce intra|all_gather intra|--volume|--env|job: if it is')
# Words of an example that stand for a value.
PLACEHOLDERS = {'N': '2', 'K': '2', 'R': '0', '$R': '0', 'RANKS': '2', 'THREADS': '1', 'SECONDS': '1', 'HOST:PORT': 'localhost:29400', 'SIZE': '1GB'}
# Flags of other programs, named as such.
OTHERS = {'--repeat': 'ctest', '--signal': 'sbatch, scancel', '--logdir': 'tensorboard', '--gpus-per-node': 'srun', '--overlap': 'srun', '--network': 'docker',
          '--stop-timeout': 'docker', '--userns': 'podman', '--shm-size': 'docker', '--cpus': 'docker', '--cpuset-cpus': 'docker', '--pids-limit': 'docker',
          '--cap-add': 'docker', '--install': 'cmake'}

FENCE = re.compile(r'^```(\w*) ?([^\n]*)\n(.*?)^```$', re.M | re.S)

def spans(text):
    """Code in lines, without blocks."""
    return [' '.join(s.split()) for s in re.findall(r'`([^`]+)`', FENCE.sub('', text))]

def lines(text):
    """Lines of indented blocks, with those that go on joined."""
    blocks = [re.sub(r'(?m)^    ', '', block) for block in re.findall(r'(?m)(?:^    .+\n)+', re.sub(r'(?m)^ *[-*\d].*\n(?: .*\n)*', '', FENCE.sub('', text)))]
    return [line for block in blocks for line in block.replace('\\\n', ' ').splitlines()]

def program_of(word):
    """Of ours, a script of bench/ or tools/, or a name of NOT_RUN; else None."""
    word = word.lstrip('(')
    name = os.path.basename(word)
    if re.match(r'(bench|tools)/\w+\.(py|sh)$', word) and name not in NOT_RUN: return word
    return name if name in OURS or name in NOT_RUN else None

def commands(line):
    """The words of each command, from its program on."""
    try: words = shlex.split(line, comments=True)
    except ValueError: return []  # prose
    words = [w for word in words for w in ([word.rstrip(';'), ';'] if word.endswith(';') else [word])]
    found, current = [], None
    for word in words:
        if word in ('|', '||', '&&', ';', '&') or re.match(r'\d?[<>]', word): current = None
        elif current is not None: current.append(word)
        elif program := program_of(word): found.append(current := [program])
    return found

def is_command(span):
    """Whether the code of a line is a command with flags: of a program, perhaps with variables before it."""
    words = [w for w in span.split() if not re.match(r'[A-Z_]+=', w)]
    return len(words) > 1 and program_of(words[0]) in OURS and any(w.startswith('-') for w in words)

def concrete(words):
    """The words without '…' and brackets, with the first of alternatives, and values for placeholders."""
    words = [w.strip('[]').rstrip('…') for w in words if not w.startswith('…')]
    words = [w.split('|')[0] if re.fullmatch(r'[\w-]+(\|[\w-]+)+', w) else w for w in words]
    return [PLACEHOLDERS.get(w, w) for w in words if w]

def environment(**more):
    launcher = re.compile(r'(OMPI|PMI|PMIX|SLURM|PALS|RZ|NCCL|MASTER)_|RANK$|WORLD_SIZE$')
    return {k: v for k, v in os.environ.items() if not launcher.search(k)} | {'PATH': f'{PROGRAMS}:{os.environ["PATH"]}', 'DS_ENV_FILE': ''} | more

WRONG = re.compile(r'unknown flag|unexpected argument|is a flag of|a flag of Trainer|see .*--help|did you mean|exclude each other|no command')
# What is missing in the middle of a command that a line shows a part of.
PART = re.compile(r'is required|required to|requires? |required\b|a value is missing|no command; see|how many ranks|no program to start')

def refusal(words, in_part, folder):
    """What the program says of its words; empty if they are right."""
    program, *rest = words
    if '/' in program:
        source = (ROOT / program).read_text()
        return ', '.join(f'{program} has no {w}' for w in rest if w.startswith('--') and not re.search(rf'(?<![\w-]){w}(?![\w-])', source))
    if program == 'rzrun':
        inner = next((i for i, w in enumerate(rest) if os.path.basename(w) in OURS + list(NOT_RUN)), None)
        if inner is not None:
            if wrong := refusal([os.path.basename(rest[inner]), *rest[inner + 1:]], in_part, folder): return wrong
            rest = rest[:inner] + ['true']
        rest = ['--dry-run', *rest]
    if program in NOT_RUN: return ''
    # Parsed, and then refused before anything is measured.
    if program.endswith('_bench'): rest = [w for i, w in enumerate(rest) if '--json' not in (w, rest[i - 1] if i else '')] + ['--json', '/nowhere/x.json']
    p = subprocess.run([f'{PROGRAMS}/{program}', *rest], cwd=folder, env=environment(NCCL_TESTS_SPLIT='1'), stdin=subprocess.DEVNULL,
                       capture_output=True, text=True, timeout=60)
    said = p.stderr.strip()
    if p.returncode == 0 or not WRONG.search(said) or in_part and PART.search(said): return ''
    return said

def nested(path, value):
    for key in reversed(path.split('.') if path else []): value = {key: value}
    return value

def merged(a, b):
    return {k: merged(a[k], b[k]) if k in a and k in b and isinstance(a[k], dict) and isinstance(b[k], dict) else b.get(k, a.get(k)) for k in a | b}

MODEL = dict(model_type='llama', vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000, tie_word_embeddings=True)
COMPLETE = dict(train_micro_batch_size_per_gpu=1, optimizer=dict(type='AdamW', params=dict(lr=0.01)), zero_optimization=dict(stage=2))
# Sections of which a line may show one key alone, or a value.
SECTIONS = ['', 'ringzero', 'ringzero.checkpoint', 'fp16', 'bf16', 'torch_autocast', 'zero_optimization', 'flops_profiler']
VALUES = ['scheduler', 'optimizer']

# Not what a run needs beside the section, such as evaluations.
WRONG_KEY = re.compile(r'unknown key|expected |is not one of|moved to|is no ')

def configuration_refusal(config, folder):
    for name, content in (('config.json', MODEL), ('ds.json', merged(COMPLETE, config))):
        pathlib.Path(folder, name).write_text(json.dumps(content))
    p = subprocess.run([f'{PROGRAMS}/plan', '--model', 'config.json', '--config', 'ds.json', '--ranks', '4'], cwd=folder, env=environment(),
                       capture_output=True, text=True, timeout=60)
    return p.stderr.strip() if p.returncode == 2 and WRONG_KEY.search(p.stderr) else ''

def example_refusal(example, folder):
    """Why an example is no part of a configuration; empty if it is."""
    is_object = example.startswith('{')
    try: value = json.loads(example if is_object else f'{{{example}}}')
    except ValueError as e: return f'no JSON: {e}'
    whole = configuration_refusal(value, folder)
    is_section = any(isinstance(v, dict) for v in value.values())
    places = VALUES if is_object else [] if is_section else SECTIONS
    return whole and (all(configuration_refusal(nested(place, value), folder) for place in places) and whole or '')

class Examples(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def test_commands(self):
        checked = 0
        for page in PAGES:
            text = page.read_text()
            for line, in_part in [(line, '…' in line) for line in lines(text)] + [(span, True) for span in spans(text) if is_command(span)]:
                found = commands(line)
                checked += len(found)
                with self.subTest(page=page.name, line=line):
                    self.assertTrue(found or TEXT.match(line), 'neither a command of ours nor in NOT_RUN')
                    for words in found: self.assertEqual(refusal(concrete(words), in_part, self.folder.name), '')
        self.assertGreater(checked, 60)

    def test_blocks_of_commands_have_their_output(self):
        for page in PAGES:
            blocks = [language for language, _, _ in FENCE.findall(page.read_text())]
            for i, language in enumerate(blocks):
                if language == 'sh': self.assertEqual(blocks[i + 1:i + 2], ['text'], page.name)
                self.assertNotIn(language, ('bash', 'shell', 'console'), f'{page.name}: call it sh, so that it is run')

    def test_configurations(self):
        checked = 0
        for page in PAGES:
            text = page.read_text()
            blocks = [body for language, name, body in FENCE.findall(text) if language == 'json' and not name]  # check.py runs those with a name
            for example in blocks + [s for s in spans(text) if re.match(r'\{"|"\w+": ', s) and '…' not in s]:
                checked += 1
                with self.subTest(page=page.name, example=example): self.assertEqual(example_refusal(example.strip(), self.folder.name), '')
        self.assertGreater(checked, 10)

    def test_wrong_examples_are_found(self):
        self.assertIn('unknown flag --mdoel', refusal(commands('rzrun -n 2 train_lm --mdoel x')[0], True, self.folder.name))
        self.assertIn('--frob', refusal(commands('rzrun -n 2 --frob train_lm')[0], True, self.folder.name))
        self.assertIn('unknown key', example_refusal('"checkpoint": {"exclude_frozen_parameters": true}', self.folder.name))
        self.assertIn('unknown key', example_refusal('"no_such_key": 1', self.folder.name))

    def test_flags(self):
        words = set()
        for program in OURS: words |= set(re.findall(r'(?<![\w-])--[a-z][\w-]*', self.help(program)))
        for command in ('inspect', 'verify', 'diff', 'merge', 'split'): words |= set(re.findall(r'(?<![\w-])--[a-z][\w-]*', self.help('checkpoint', command)))
        words |= {f'--{name}' for name in re.findall(r'"([a-z]\w+)"', (ROOT / 'sharding/config/arguments.cpp').read_text())}
        for script in [*ROOT.glob('bench/*.py'), *ROOT.glob('tools/*.py'), *ROOT.glob('tools/*.sh'), ROOT / 'tools/command_line/launcher_flags.cpp']:
            words |= set(re.findall(r'(?<![\w-])--[a-z][\w-]*', script.read_text()))
        known = {w.replace('_', '-') for w in words}
        for page in PAGES:
            for span in spans(page.read_text()):
                for flag in re.findall(r'(?<![\w-])--[a-z][\w-]*', span):
                    if flag.replace('_', '-') not in known | set(OTHERS):
                        with self.subTest(page=page.name, span=span): self.fail(f'no program has {flag}')

    def help(self, *command):
        p = subprocess.run([f'{PROGRAMS}/{command[0]}', *command[1:], '--help'], env=environment(), capture_output=True, text=True)
        self.assertEqual(p.returncode, 0, p.stderr)
        return p.stdout

    def test_help_has_no_defaults_of_the_parser(self):
        for program in OURS: self.assertNotRegex(self.help(program), r'\{(true|false)\}', program)

    def test_programs_name_their_version(self):
        version = re.search(r'project\(\w+ VERSION ([\d.]+)', (ROOT / 'CMakeLists.txt').read_text())[1]
        for program in OURS:
            p = subprocess.run([f'{PROGRAMS}/{program}', '--version'], env=environment(), capture_output=True, text=True)
            self.assertEqual((p.returncode, p.stdout), (0, f'ringzero {version}\n'), program + p.stderr)

    def test_python_blocks_compile(self):
        for page in PAGES:
            for language, _, body in FENCE.findall(page.read_text()):
                if language == 'python': compile(body, page.name, 'exec')

if __name__ == '__main__':
    unittest.main()
