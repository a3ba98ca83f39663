#!/usr/bin/env python3
"""Writes expected.json: tokenizers of every part that sharding/tokenizer reads, each on a small vocabulary, and what
Hugging Face's tokenizers 0.23.3 makes of some texts and ids, null where it panics; and merges of its BpeTrainer.
tests/sharding/tokenizer_test.cpp compares its own results.

    make_expected.py >expected.json          (pip install tokenizers==0.23.3)"""
import json
import sys
from tokenizers import Tokenizer, models as models_of_tokenizers, pre_tokenizers, trainers

WORD = '▁'

def byte_characters():
    codes, following = [], 256
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        codes.append(chr(byte if printable else following))
        following += not printable
    return codes

BYTES = byte_characters()

def spelt(text):
    return ''.join(BYTES[b] for b in text.encode())

def model(alphabet, merged, **options):
    """Merges build each word of `merged` from its left."""
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    merges = []
    for word in merged:
        left = word[0]
        for c in word[1:]:
            if left + c not in vocabulary:
                vocabulary[left + c] = len(vocabulary)
                merges.append([left, c])
            left += c
    return {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
            'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
            'vocab': vocabulary, 'merges': merges, **options}

def models():
    words = [' the', ' don', "'t", 'é', ' ñ', '中', ' пр', '12', '...', '\n\n', '  ', 'ing']
    level = model(sorted(BYTES), [spelt(w) for w in words])
    whole = json.loads(json.dumps(level))
    for word in [' hello', '文字', '123']:  # without merges
        whole['vocab'].setdefault(spelt(word), len(whole['vocab']))
    whole['ignore_merges'] = True
    old = dict(level, merges=[' '.join(m) for m in level['merges']])
    pieces = ['the', WORD + 'the', WORD + 'a', WORD + WORD, 'ing', 'héllo', WORD + '中', '12', '..']
    chars = sorted(set(''.join(pieces)) | set('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?<>|_ ' + "'\n"))
    alphabet = ['<unk>', '<s>', '</s>'] + [f'<0x{b:02X}>' for b in range(256)]
    fallback = model(alphabet + chars, pieces, unk_token='<unk>', fuse_unk=True, byte_fallback=True)
    unknown = model(['<unk>'] + chars, pieces, unk_token='<unk>', fuse_unk=True)
    return {'level': level, 'whole': whole, 'old': old, 'fallback': fallback, 'fused': unknown,
            'unknown': dict(unknown, fuse_unk=False), 'dropped': dict(unknown, unk_token=None),
            'half': dict(model(['<unk>', '<0xC3>', '<0xA9>'] + chars, pieces, unk_token='<unk>', byte_fallback=True))}

def added(id, content, **flags):
    return {'id': id, 'content': content, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False,
            'special': False, **flags}

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace('{1,3}', '')
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

def byte_level(**options):
    return {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True, **options}

def split(pattern, behavior='Isolated', invert=False, kind='Regex'):
    return {'type': 'Split', 'pattern': {kind: pattern}, 'behavior': behavior, 'invert': invert}

def sequence(key, *parts):
    return {'type': 'Sequence', key: list(parts)}

def replace(pattern, content, kind='String'):
    return {'type': 'Replace', 'pattern': {kind: pattern}, 'content': content}

def metaspace(**options):
    return {'type': 'Metaspace', 'replacement': WORD, 'prepend_scheme': 'always', 'split': True, **options}

def template(*pieces, **ids):
    items = [{'Sequence': {'id': 'A', 'type_id': 0}} if p == 'A' else {'SpecialToken': {'id': p, 'type_id': 0}} for p in pieces]
    return {'type': 'TemplateProcessing', 'single': items, 'pair': items + [{'Sequence': {'id': 'B', 'type_id': 1}}],
            'special_tokens': {p: {'id': p, 'ids': [ids[p]], 'tokens': [p]} for p in pieces if p != 'A'}}

def variants():
    """Name, model, and the other parts of a tokenizer.json."""
    level, end = byte_level(), {'decoder': byte_level()}
    def of_level(name, pre_tokenizer, model='level', **parts):
        return name, model, {'pre_tokenizer': pre_tokenizer, **end, **parts}
    def then_level(name, *before, model='level', **parts):
        return of_level(name, sequence('pretokenizers', *before, byte_level(use_regex=False)), model, **parts)
    yield of_level('gpt2', level)
    yield of_level('gpt2 with a blank before', byte_level(add_prefix_space=True), post_processor=byte_level(), model='old')
    yield of_level('words without merges', level, model='whole')
    yield then_level('llama3', split(LLAMA3), model='whole')
    yield then_level('qwen2', split(QWEN2), normalizer={'type': 'NFC'})
    yield then_level('gpt4o', split(GPT4O))
    yield then_level('gpt2 by a split', split(GPT2))
    yield of_level('smollm2', sequence('pretokenizers', {'type': 'Digits', 'individual_digits': True}, level))
    yield of_level('digits', sequence('pretokenizers', {'type': 'Digits', 'individual_digits': False}, byte_level(add_prefix_space=True)))
    for behavior in ['Removed', 'Isolated', 'MergedWithPrevious', 'MergedWithNext', 'Contiguous']:
        yield then_level('split ' + behavior, split(r'\s|[.,]', behavior))
        yield then_level('split inverted ' + behavior, split(r'\p{L}+', behavior, True))
        yield then_level('split text ' + behavior, split('l', behavior, kind='String'))
        yield then_level('punctuation ' + behavior, {'type': 'Punctuation', 'behavior': behavior})
    yield then_level('split at nothing', split('', kind='String'))
    yield then_level('whitespace', {'type': 'Whitespace'})
    yield then_level('whitespace split', {'type': 'WhitespaceSplit'})
    yield then_level('delimiter', {'type': 'CharDelimiterSplit', 'delimiter': 'e'})
    yield then_level('empty sequence', sequence('pretokenizers'))
    yield of_level('bytes before digits', sequence('pretokenizers', level, {'type': 'Digits', 'individual_digits': True}))
    yield 'bytes by the normalizer', 'level', {'normalizer': {'type': 'ByteLevel'}, 'pre_tokenizer': None, **end}
    for form in ['NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'StripAccents']:
        yield of_level(form, level, normalizer={'type': form})
    yield of_level('no accents', level, normalizer=sequence('normalizers', {'type': 'NFD'}, {'type': 'StripAccents'}, {'type': 'Lowercase'}))
    yield of_level('strip', level, normalizer={'type': 'Strip', 'strip_left': True, 'strip_right': True})
    yield of_level('strip left', level, normalizer={'type': 'Strip', 'strip_left': True, 'strip_right': False})
    yield of_level('replace', level, normalizer=sequence('normalizers', replace(r'\s+', ' ', 'Regex'), replace('ll', 'L')))

    specials = [added(0, '<unk>', special=True), added(1, '<s>', special=True), added(2, '</s>', special=True)]
    llama2 = sequence('decoders', replace(WORD, ' '), {'type': 'ByteFallback'}, {'type': 'Fuse'},
                      {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0})
    begin = sequence('normalizers', {'type': 'Prepend', 'prepend': WORD}, replace(' ', WORD))
    first = template('<s>', 'A', **{'<s>': 1})
    yield 'llama2', 'fallback', {'added_tokens': specials, 'normalizer': begin, 'post_processor': first, 'decoder': llama2}
    yield 'llama2 of normalized tokens', 'fallback', {
        'added_tokens': [dict(t, normalized=True) for t in specials], 'normalizer': begin, 'post_processor': first, 'decoder': llama2}
    for scheme in ['always', 'first', 'never']:
        for cut in [True, False]:
            yield f'metaspace {scheme} {cut}', 'fallback', {
                'added_tokens': specials, 'pre_tokenizer': metaspace(prepend_scheme=scheme, split=cut),
                'post_processor': sequence('processors', template('<s>', 'A', '</s>', **{'<s>': 1, '</s>': 2})),
                'decoder': sequence('decoders', {'type': 'ByteFallback'}, metaspace(prepend_scheme=scheme))}
    yield 'old metaspace', 'fused', {'pre_tokenizer': {'type': 'Metaspace', 'replacement': WORD, 'add_prefix_space': True},
                                     'decoder': {'type': 'Metaspace', 'replacement': WORD, 'add_prefix_space': True}}
    yield 'words and metaspace', 'unknown', {'pre_tokenizer': sequence('pretokenizers', {'type': 'WhitespaceSplit'}, metaspace(prepend_scheme='first'))}
    yield 'dropped', 'dropped', {'decoder': {'type': 'Fuse'}}
    yield 'some bytes', 'half', {'decoder': sequence('decoders', {'type': 'ByteFallback'}, {'type': 'Strip', 'content': 'l', 'start': 1, 'stop': 1})}
    yield 'fused decoders', 'fallback', {'decoder': sequence(
        'decoders', {'type': 'Fuse'}, replace('the', 'THE'), replace('l+', 'L', 'Regex'), {'type': 'Strip', 'content': ' ', 'start': 2, 'stop': 1})}

    base = len(models()['level']['vocab'])
    tokens = [added(base, '<|end|>', special=True), added(base + 1, '<|end|>>'), added(base + 2, '<|left|>', lstrip=True),
              added(base + 3, '<|right|>', rstrip=True), added(base + 4, '<|both|>', lstrip=True, rstrip=True, special=True),
              added(base + 5, 'ell', single_word=True), added(base + 6, 'Hello', normalized=True), added(base + 7, '  ')]
    yield of_level('added tokens', level, added_tokens=tokens)
    yield of_level('added tokens in lower case', level, added_tokens=tokens, normalizer={'type': 'Lowercase'})

TEXTS = [
    '', ' ', "Hello, don't the world's   end?\n\n  I'LL go.\r\n", 'ÀéÎ naïve ﬁ ½ ① Ǆ Σας ſ İI', 'hello 文字中文, привет 12345 ٣٤٥!',
    '  the ing\t\tx\n y  ', "we've'S 'Re\u00a0x\u3000\u2028y", 'e\u0301\u0327 \u1100\u1161\u11a8 \ufb01 \U0001F468\u200d\U0001F469 \U0001F44D\U0001F3FD\x00\x7f',
    'a<|end|>b <|end|>>\n <|left|> x <|right|>  \n y  <|both|>  ', 'ell hell ell. Hello hello hELLO  <s>x</s> <unk>', '<0x41><0x4', '▁▁ ▁the Ġ',
    '\U00031350 \U0002EBF0\U000143FA x\U00011380']  # of Unicode 15 and 16
IDS = [[3, 4, 5], [198, 199, 65, 200], [229, 186, 174, 64], [300, 1, 0, 2, 260, 99999], [230, 151, 170, 0, 230, 151]]

def short(value):
    return json.dumps(value, separators=(',', ':'))

def theirs_or_none(f):
    """None where tokenizers panics, in offsets and slices."""
    try:
        return f()
    except BaseException as error:
        print(error, file=sys.stderr)
        return None

TRAINED = ('the cat sat on the mat, the cat\'s hat; the rat sat. naïve café 中文中文 123 123 aaaa aaaaaa\n\n  the the  end'
           ' banana bandana <|endoftext|> ananas')

def trained(size, special):
    tokenizer = Tokenizer(models_of_tokenizers.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([TRAINED], trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    of = json.loads(tokenizer.to_str())['model']
    return {'size': size, 'special': special, 'vocab_size': len(of['vocab']),
            'from_259': [token for token, id in sorted(of['vocab'].items(), key=lambda e: e[1]) if id >= 259],
            'merges': [' '.join(m) for m in of['merges']]}

def main():
    bases, every = models(), []
    for name, base, parts in variants():
        tokenizer = {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [], 'normalizer': None,
                     'pre_tokenizer': None, 'post_processor': None, 'decoder': None, **parts}
        theirs = Tokenizer.from_str(json.dumps({**tokenizer, 'model': bases[base]}))
        cases = [[theirs_or_none(lambda: theirs.encode(text).ids)] for text in TEXTS] + [[ids] for ids in IDS]
        for case in cases:
            if case[0] is None:
                continue
            both = [theirs_or_none(lambda: theirs.decode(case[0], skip_special_tokens=skip)) for skip in [False, True]]
            case += both[:1] if both[0] == both[1] else both
        every.append({'name': name, 'model': base, 'tokenizer': parts, 'cases': cases})
    print('{"models": {')
    print(',\n'.join(f'{json.dumps(k)}: {short(v)}' for k, v in bases.items()))
    print('}, "texts": ' + json.dumps(TEXTS) + ',\n"tokenizers": [')
    print(',\n'.join(short(e) for e in every))
    print('], "trained_on": ' + json.dumps(TRAINED) + ', "trained": [')
    print(',\n'.join(short(trained(size, special)) for size, special in [(300, ['<|endoftext|>']), (290, []), (1000, ['a', 'th', '<pad>'])]))
    print(']}')

if __name__ == '__main__':
    main()
