#!/usr/bin/env python3
"""The reports of train_lm, each read by the program it is for, or by a reader of its own: event files of TensorBoard,
traces, --track, and pictures of the program report.

    reports_test.py ROOT PROGRAMS"""
import json, math, os, signal, socket, struct, subprocess, sys, tempfile, time, unittest
import xml.etree.ElementTree as xml
PROGRAMS = os.path.abspath(sys.argv.pop(2))
ROOT = os.path.abspath(sys.argv.pop(1))
MODEL = dict(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=256, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
CONFIG = dict(train_batch_size=4, optimizer=dict(type='AdamW', params=dict(lr=0.01)), zero_optimization=dict(stage=3))

# ---- event files: TFRecord framing and protocol buffers, from their specifications

def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8): crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff

def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff

def records(path):
    with open(path, 'rb') as f: data = f.read()
    at = 0
    while at < len(data):
        length, of_length = struct.unpack_from('<QI', data, at)
        assert masked(data[at:at + 8]) == of_length, (path, at)
        body = data[at + 12:at + 12 + length]
        assert masked(body) == struct.unpack_from('<I', data, at + 12 + length)[0], (path, at)
        yield body
        at += 16 + length

def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7f) << shift, shift + 7, at + 1
        if byte < 0x80: return value, at

def message(data):
    """{field: [values]}"""
    fields, at = {}, 0
    while at < len(data):
        tag, at = varint(data, at)
        wire = tag & 7
        if wire == 0: value, at = varint(data, at)
        elif wire == 1: value, at = struct.unpack_from('<d', data, at)[0], at + 8
        elif wire == 5: value, at = struct.unpack_from('<f', data, at)[0], at + 4
        else:
            assert wire == 2
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        fields.setdefault(tag >> 3, []).append(value)
    return fields

def own_reader(folder):
    """{tag: [(step, value)]}: the files of a folder in the order of their names, as TensorBoard reads them."""
    scalars = {}
    for name in sorted(os.listdir(folder)):
        for number, body in enumerate(records(f'{folder}/{name}')):
            event = message(body)
            step = event.get(2, [0])[0]
            if number == 0: assert event[3] == [b'brain.Event:2'], event
            if 7 in event:
                assert message(event[7][0]) == {1: [1]}
                scalars = {tag: [v for v in values if v[0] < step] for tag, values in scalars.items()}
            for summary in event.get(5, []):
                for value in message(summary)[1]:
                    v = message(value)
                    scalars.setdefault(v[1][0].decode(), []).append((step, v[2][0]))
            assert abs(event[1][0] - time.time()) < 3600
    return {tag: values for tag, values in scalars.items() if values}

def tensorboards_reader(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    reader = EventAccumulator(folder, size_guidance={'scalars': 0, 'tensors': 0})
    reader.Reload()
    tags = reader.Tags()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags['scalars']}

try:
    import tensorboard
    READERS = [own_reader, tensorboards_reader]
except ImportError:
    READERS = [own_reader]
    print('tensorboard is not installed: event files are read by an own reader alone', file=sys.stderr)

# ---- traces

TRACE_SCHEMA = {
    'type': 'object', 'required': ['traceEvents'],
    'properties': {'displayTimeUnit': {'enum': ['ms', 'ns']}, 'traceEvents': {'type': 'array', 'minItems': 1, 'items': {
        'type': 'object', 'required': ['name', 'ph', 'pid'],
        'properties': {'name': {'type': 'string', 'minLength': 1}, 'cat': {'type': 'string'}, 'ph': {'enum': ['X', 'C', 'M']}, 'pid': {'type': 'integer'},
                       'tid': {'type': 'integer'}, 'ts': {'type': 'number', 'minimum': 0}, 'dur': {'type': 'number', 'minimum': 0}, 'args': {'type': 'object'}},
        'allOf': [{'if': {'properties': {'ph': {'const': 'X'}}}, 'then': {'required': ['ts', 'dur', 'tid', 'cat']}},
                  {'if': {'properties': {'ph': {'const': 'C'}}}, 'then': {'required': ['ts', 'args'], 'properties': {
                      'args': {'minProperties': 1, 'additionalProperties': {'type': 'number'}}}}},
                  {'if': {'properties': {'ph': {'const': 'M'}}}, 'then': {'required': ['args'], 'properties': {
                      'name': {'enum': ['process_name', 'thread_name']}, 'args': {'required': ['name']}}}}]}}}}

def check_schema(value, schema, path='trace'):
    """The keywords that TRACE_SCHEMA has, where python3-jsonschema is missing."""
    types = {'object': dict, 'array': list, 'string': str, 'integer': int, 'number': (int, float)}
    assert 'type' not in schema or (isinstance(value, types[schema['type']]) and not isinstance(value, bool)), (path, value)
    assert 'enum' not in schema or value in schema['enum'], (path, value)
    assert 'const' not in schema or value == schema['const'], (path, value)
    assert value >= schema['minimum'] if 'minimum' in schema else True, (path, value)
    assert len(value) >= schema.get('minItems', schema.get('minLength', schema.get('minProperties', 0))) if hasattr(value, '__len__') else True, path
    for key in schema.get('required', []): assert key in value, (path, key, value)
    for i, item in enumerate(value if 'items' in schema else []): check_schema(item, schema['items'], f'{path}[{i}]')
    if isinstance(value, dict):
        for key, v in value.items():
            inner = schema.get('properties', {}).get(key, schema.get('additionalProperties'))
            if inner: check_schema(v, inner, f'{path}.{key}')
    for rule in schema.get('allOf', []):
        try: check_schema(value, rule['if'])
        except AssertionError: continue
        check_schema(value, rule['then'], path)

def validate(trace):
    check_schema(trace, TRACE_SCHEMA)
    try: import jsonschema
    except ImportError: return print('jsonschema is not installed: traces are checked by an own checker alone', file=sys.stderr)
    jsonschema.validate(trace, TRACE_SCHEMA)

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

class Reports(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.put('model.json', json.dumps(MODEL))
        self.put('text.txt', 'the quick brown fox jumps over the lazy dog. ' * 60)

    def path(self, name): return f'{self.directory.name}/{name}'
    def put(self, name, content):
        with open(self.path(name), 'w') as f: f.write(content)
        return self.path(name)
    def get(self, name):
        with open(self.path(name)) as f: return f.read()
    def lines(self, name): return [json.loads(line) for line in self.get(name).splitlines()]

    def start(self, *words, ranks=1, config={}):
        self.put('ds.json', json.dumps(CONFIG | config))
        port, command = str(free_port()), [f'{PROGRAMS}/train_lm', '--model', self.path('model.json'), '--config', self.path('ds.json'),
                                           '--data', self.path('text.txt'), '--threads', '1', *words]
        base = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE')}
        return [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=base | dict(
            RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=port)) for r in range(ranks)]

    def end(self, processes, status=0):
        outs = [p.communicate(timeout=120) for p in processes]
        self.assertEqual([p.returncode for p in processes], [status] * len(processes), outs)
        return outs[0]

    def train(self, *words, ranks=1, config={}, status=0):
        return self.end(self.start(*words, ranks=ranks, config=config), status)

    def wait_for(self, process, condition):
        end = time.time() + 60
        while not condition():
            self.assertIsNone(process.poll(), process.poll() is not None and process.communicate())
            self.assertLess(time.time(), end)
            time.sleep(0.05)

    # ---- TensorBoard

    def test_event_files_are_read_by_tensorboard_and_go_on_when_a_run_is_resumed(self):
        events, words = self.path('events'), ['--metrics', self.path('metrics.jsonl'), '--tensorboard', self.path('events'), '--output-dir',
                                              self.path('checkpoints'), '--save-steps', '3', '--resume', 'true', '--eval-steps', '2', '--validation-split-percentage', '10']
        self.train(*words, '--steps', '5')
        os.remove(f'{self.path("checkpoints")}/latest')  # the updates after the first checkpoint are made again
        with open(f'{self.path("checkpoints")}/latest', 'w') as f: f.write('global_step3')
        self.train(*words, '--steps', '8')
        self.assertEqual(len(os.listdir(events)), 2)
        updates = self.lines('metrics.jsonl')
        self.assertEqual([u['step'] for u in updates], list(range(8)))
        for read in READERS:
            scalars = read(events)
            for tag, key in (('Train/Samples/train_loss', 'loss'), ('Train/Samples/lr', 'lr'), ('Train/Samples/grad_norm', 'grad_norm'),
                             ('Train/Samples/tokens_per_second', 'tokens_per_second'), ('Eval/Samples/eval_loss', 'eval_loss')):
                wanted = [(4 * (u['step'] + 1), u[key]) for u in updates if key in u]
                self.assertEqual([s for s, _ in scalars[tag]], [s for s, _ in wanted], (read.__name__, tag))
                rounded = 0.05 if key == 'tokens_per_second' else 0  # to tenths in metrics.jsonl
                for (_, value), (_, other) in zip(scalars[tag], wanted):
                    self.assertTrue(math.isclose(value, other, rel_tol=1e-5, abs_tol=1.01 * rounded), (tag, value, other))
            self.assertEqual(len(scalars['Train/Samples/exposed_comm_ms']), 8)

    def test_event_files_are_there_while_a_run_goes_on(self):
        out = self.path('seen')
        self.train('--steps', '3', '--tensorboard', self.path('events'), '--track', f'while read line; do cat {self.path("events")}/* > {out} || true; done')
        self.assertGreater(len(list(records(out))), 2)

    # ---- traces

    def test_a_trace_has_all_ranks_and_overlapping_work_on_tracks_of_its_own(self):
        self.train('--steps', '4', '--trace', self.path('trace.json'), '--trace-steps', '2:3', ranks=2)
        trace = json.loads(self.get('trace.json'))
        validate(trace)
        spans = [e for e in trace['traceEvents'] if e['ph'] == 'X']
        for rank in (0, 1):
            own = [e for e in spans if e['pid'] == rank]
            names = [e['name'] for e in own]
            for name in ('update 2', 'update 3'): self.assertEqual(names.count(name), 1, names)
            self.assertTrue({'forward', 'backward', 'reduction', 'step', 'all_gather', 'reduce_scatter', 'wait'} <= set(names), names)
            updates = {e['name']: e for e in own}
            inside = lambda e, u: u['ts'] - 1 <= e['ts'] and e['ts'] + e['dur'] <= u['ts'] + u['dur'] + 1
            for e in own:
                if e['name'] in ('backward', 'step'): self.assertTrue(any(inside(e, updates[u]) for u in ('update 2', 'update 3')), e)
            for track in {e['tid'] for e in own} - {0}:  # of communication: one after the other
                ordered = sorted((e for e in own if e['tid'] == track), key=lambda e: e['ts'])
                for a, b in zip(ordered, ordered[1:]): self.assertLessEqual(a['ts'] + a['dur'], b['ts'] + 0.01)
        collectives = [[e for e in sorted(spans, key=lambda e: e['ts']) if e['pid'] == rank and e['name'] == 'reduce_scatter'] for rank in (0, 1)]
        self.assertEqual(*map(len, collectives))
        for a, b in zip(*collectives):  # the ranks have one clock: none ends where another has not begun
            self.assertLess(max(a['ts'], b['ts']), min(a['ts'] + a['dur'], b['ts'] + b['dur']))
        self.assertTrue(any(e['ph'] == 'C' and e['args']['parameters'] > 0 for e in trace['traceEvents']))

    def test_files_of_an_earlier_run_do_not_outlive_the_beginning_of_another_one(self):
        self.put('trace.json', 'earlier'), self.put('flops.txt', 'earlier'), self.put('metrics.jsonl', 'earlier')
        words, config = ['--trace', self.path('trace.json'), '--metrics', self.path('metrics.jsonl')], dict(
            flops_profiler=dict(enabled=True, profile_step=5, output_file=self.path('flops.txt')))
        self.train('--steps', '2', '--trace-steps', '0:1', *words, config=config, status=2)
        for name in ('trace.json', 'flops.txt', 'metrics.jsonl'): self.assertEqual(self.get(name), 'earlier')
        self.train('--steps', '2', *words, config=config)  # ends before the updates that are traced and profiled
        self.assertEqual(self.get('flops.txt'), '')
        self.assertEqual(self.get('trace.json'), '')
        self.assertEqual(len(self.lines('metrics.jsonl')), 2)

    def test_a_profile_outlives_the_run_that_goes_on(self):
        config, words = dict(flops_profiler=dict(enabled=True, profile_step=1, output_file=self.path('flops.txt'))), ['--output-dir', self.path('checkpoints')]
        self.train('--steps', '2', *words, '--save-steps', '2', config=config)
        profile = self.get('flops.txt')
        self.assertIn('update', profile)
        self.train('--steps', '3', *words, '--resume', 'true', config=config)
        self.assertEqual(self.get('flops.txt'), profile)

    def test_a_wrong_trace_is_refused(self):
        for wrong in ({}, {'traceEvents': [{'name': 'x', 'ph': 'X', 'pid': 0, 'tid': 0, 'ts': 1, 'cat': ''}]}, {'traceEvents': [{'name': 'x', 'ph': 'M', 'pid': 0, 'args': {}}]}):
            with self.assertRaises(AssertionError): check_schema(wrong, TRACE_SCHEMA)

    # ---- breakdowns, comms_logger

    def test_breakdowns_and_the_table_of_collectives_are_printed(self):
        out, err = self.train('--steps', '4', config=dict(wall_clock_breakdown=True, memory_breakdown=True, steps_per_print=2, comms_logger=dict(enabled=True)), ranks=2)
        self.assertEqual(out.count('time (ms) | fwd: '), 2, out)
        self.assertEqual(out.count('\n  parameters '), 2, out)
        self.assertNotIn('has no effect', err)
        self.assertIn('Comm. Op', out)
        self.assertIn('\nreduce_scatter\n', out)

    # ---- --track

    def test_track_receives_the_course_of_a_run(self):
        self.train('--steps', '4', '--track', f'cat > {self.path("events")}', '--metrics', self.path('metrics.jsonl'), '--output-dir', self.path('checkpoints'),
                   '--save-steps', '2', '--eval-steps', '4', '--validation-split-percentage', '10', ranks=2)
        events = self.lines('events')
        self.assertEqual([e['event'] for e in events], ['start', 'update', 'update', 'checkpoint', 'update', 'update', 'evaluation', 'checkpoint', 'end'])
        self.assertEqual((events[0]['ranks'], events[0]['steps'], events[0]['config']['train_batch_size']), (2, 4, 4))
        self.assertEqual([{k: v for k, v in e.items() if k != 'event'} for e in events if e['event'] == 'update'], self.lines('metrics.jsonl'))
        self.assertEqual((events[-1]['reason'], events[-1]['step']), ('done', 3))

    def test_track_does_not_stop_training(self):
        for command in ('exit 3', 'no-such-command-anywhere'):
            out, err = self.train('--steps', '3', '--track', command)
            self.assertIn('done: 3 updates', out)
            self.assertEqual(err.count('warning: --track: '), 1, err)

    def test_track_waits_for_a_command_that_reads_nothing_until_it_ends(self):
        # 500 lines are more than a pipe holds
        processes = self.start('--steps', '500', '--track', f'echo $$ > {self.path("pid")}; exec sleep 1000', '--metrics', self.path('metrics.jsonl'))
        self.wait_for(processes[0], lambda: os.path.exists(self.path('metrics.jsonl')) and self.get('metrics.jsonl').count('\n') == 500)
        self.assertIsNone(processes[0].poll())
        os.kill(int(self.get('pid')), signal.SIGTERM)
        out, err = self.end(processes)
        self.assertIn('done: 500 updates', out)
        self.assertEqual(err.count('warning: --track: '), 1, err)

    # ---- Ctrl-C

    def test_ctrl_c_ends_with_a_summary_and_a_save(self):
        def stop(*words):
            if os.path.exists(self.path('metrics.jsonl')): os.remove(self.path('metrics.jsonl'))
            processes = self.start('--steps', '1000000', '--metrics', self.path('metrics.jsonl'), *words)
            self.wait_for(processes[0], lambda: os.path.exists(self.path('metrics.jsonl')) and self.get('metrics.jsonl').count('\n') > 2)
            processes[0].send_signal(signal.SIGINT)
            return self.end(processes, 128 + signal.SIGTERM)[0]
        out = stop('--output-dir', self.path('checkpoints'), '--track', f'cat > {self.path("events")}')
        self.assertRegex(out, r'stopped by SIGINT on rank 0 after \d+ updates; saved to ')
        self.assertRegex(out, r'so far: \d+ updates, loss [\d.]+ → [\d.]+, \d+ tokens in ')
        self.assertIn('to go on: the same command with --resume true', out)
        self.assertEqual(self.lines('events')[-1]['reason'], 'stopped')
        self.assertIn('resumed: ', self.train('--steps', '1', '--output-dir', self.path('checkpoints'), '--resume', 'true')[0])
        out = stop('--save', self.path('model'))
        self.assertIn('no checkpoint is saved without --output-dir', out)
        self.assertTrue(os.path.exists(self.path('model/model.safetensors')))

    # ---- report

    def metrics(self, name, losses, **more):
        return self.put(name, ''.join(json.dumps(dict(step=i, loss=x, grad_norm=1.0, lr=1e-3, tokens_per_second=1000.0, step_ms=10.0, exposed_comm_ms=1.0) |
                                                 {k: v[i] for k, v in more.items() if v[i] is not None}) + '\n' for i, x in enumerate(losses)))

    def report(self, *words, status=0):
        p = subprocess.run([f'{PROGRAMS}/report', *words], capture_output=True, text=True)
        self.assertEqual(p.returncode, status, p.stderr)
        return p.stdout if status == 0 else p.stderr

    def test_a_report_is_a_picture_and_a_table(self):
        losses = [5 * 0.98 ** i + 0.01 * (i % 3) for i in range(100)]
        spiked = losses[:60] + [9.0] + losses[61:]
        a, b = self.metrics('a.jsonl', losses, eval_loss=[None] * 99 + [0.7]), self.metrics('b.jsonl', spiked)
        out = self.report(a, f'{b}=A & <B>', '--output', self.path('runs.svg'), '--title', 'x')
        rows = [line.split('  ') for line in out.splitlines()]
        self.assertEqual(rows[0][0], 'run')
        row = lambda name: next(line for line in out.splitlines() if line.startswith(name))
        self.assertRegex(row('a '), r'^a +100 +0\.6\d+ +0\.6\d+ +0\.7000 +0\.7000 +1000 +10\.0 % +0 +0$')
        self.assertRegex(row('A & <B>'), r'1 \(61\) +0$')
        svg = xml.fromstring(self.get('runs.svg'))
        words = [t.text for t in svg.iter('{http://www.w3.org/2000/svg}text')]
        for word in ('a', 'A & <B>', 'Loss', 'Learning rate', 'Tokens per second', 'Exposed communication, ms per update', 'Norm of the gradients'): self.assertIn(word, words)
        titles = [t.text for t in svg.iter('{http://www.w3.org/2000/svg}title')]
        self.assertIn('update 61: 9', titles)
        self.assertIn('evaluation after update 100: 0.7', titles)
        for shape in svg.iter('{http://www.w3.org/2000/svg}path'): self.assertNotIn('nan', shape.get('d'))
        self.report(a, '--log', '--smoothing', '0', '--output', self.path('log.svg'))
        xml.fromstring(self.get('log.svg'))

    def test_a_malformed_line_is_named_and_nothing_is_written(self):
        good = json.dumps(dict(step=0, loss=1.0)) + '\n'
        for wrong, parts in ((good + '{"step": 1, "loss": }\n', ['m.jsonl:2: ']), (good + '[]\n', ['m.jsonl:2: ']), (good + '{"step": 1, "loss": "x"}\n', ['m.jsonl:2: ', 'loss']),
                             (good + good, ['m.jsonl:2: ', 'follows step 0']), ('', ['no whole line']), (good + '{"loss": 1}\n', ['m.jsonl:2: ', 'step'])):
            err = self.report(self.put('m.jsonl', wrong), '--output', self.path('none.svg'), status=2)
            self.assertEqual(err.count('\n'), 1, err)
            for part in parts: self.assertIn(part, err)
            self.assertFalse(os.path.exists(self.path('none.svg')))
        self.assertIn('--output /nowhere/x.svg: cannot be written', self.report(self.put('m.jsonl', good), '--output', '/nowhere/x.svg', status=2))
        self.report(self.put('m.jsonl', good + '{"step": 1, "lo'))  # a run that goes on
        self.report(self.put('m.jsonl', good + '{"step": 1, "loss": null}\n'))

if __name__ == '__main__':
    unittest.main()
