#!/usr/bin/env python3
"""Times the encoding of a text on one core: ours (tokenizer_bench) and Hugging Face's tokenizers, in turn. Run it with a
Python that has the package tokenizers. Each run reads the tokenizer anew, hence with no word in its cache.

    tokenizer.py [--bin build/host/bin] [--rounds R] TEXT FOLDER…        (folders with tokenizer.json)

Seconds are medians of the time of the processor; the tokens must be equally many."""
import argparse, json, os, statistics, subprocess, sys, time

os.environ.update(TOKENIZERS_PARALLELISM='false', RAYON_NUM_THREADS='1')
try:
    from tokenizers import Tokenizer
except ImportError as e:
    sys.exit(f'tokenizer.py: no tokenizers here ({e})')

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--bin', default='build/host/bin')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('text')
    parser.add_argument('folders', nargs='+')
    o = parser.parse_args()
    with open(o.text, encoding='utf-8', newline='') as file:
        text = file.read()
    megabytes = len(text.encode()) / 1e6
    ours = subprocess.Popen([f'{o.bin}/tokenizer_bench'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(f'{"tokenizer":<24} {"tokens":>9} {"tokenizers":>11} {"ours":>9} {"ratio":>7}   seconds for {megabytes:.2f} MB')
    for folder in o.folders:
        seconds = {'theirs': [], 'ours': []}
        for _ in range(o.rounds):
            theirs = Tokenizer.from_file(f'{folder}/tokenizer.json')
            begin = time.process_time()
            tokens = len(theirs.encode(text, add_special_tokens=False).ids)
            seconds['theirs'].append(time.process_time() - begin)
            print(f'{folder}\t{o.text}', file=ours.stdin, flush=True)
            answer = json.loads(ours.stdout.readline())
            seconds['ours'].append(answer['seconds'])
            if answer['tokens'] != tokens:
                sys.exit(f'{folder}: {tokens} tokens, ours are {answer["tokens"]}')
        a, b = (statistics.median(seconds[k]) for k in ('theirs', 'ours'))
        print(f'{os.path.basename(folder):<24} {tokens:9} {a:11.3f} {b:9.3f} {a / b:7.1f}', flush=True)

if __name__ == '__main__':
    main()
