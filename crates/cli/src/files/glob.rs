//! Patterns for names, as shells and `find` have them.
//!
//! `*` stands for any characters, `?` for one, `[a-z]` for one of these, `[!a-z]` for one of the others; a backslash takes the meaning
//! from what follows. Nothing is special about slashes and leading dots, as in `find -name`. Names can be any bytes: each
//! byte that is no UTF-8 is a character of its own.

/// A pattern, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
    ignores_case: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    One(Character),
    AnyOne,
    Any,
    Class { excludes: bool, ranges: Vec<(Character, Character)> },
}

/// A character, or behind all of them a byte that is none.
type Character = u32;

/// The first of them.
const FOREIGN: Character = 0x0011_0000;

fn characters(bytes: &[u8], folds: bool) -> Vec<Character> {
    let mut characters = Vec::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match folds {
                true => characters.extend(character.to_lowercase().map(Character::from)),
                false => characters.push(character.into()),
            }
        }
        characters.extend(chunk.invalid().iter().map(|&byte| FOREIGN + Character::from(byte)));
    }
    characters
}

impl Glob {
    /// Takes a pattern apart. Each string of bytes is one: a bracket without its end stands for itself.
    pub fn new(pattern: &[u8], ignores_case: bool) -> Glob {
        let pattern = characters(pattern, ignores_case);
        let mut parts = Vec::new();
        let mut rest = &pattern[..];
        while let Some((&first, behind)) = rest.split_first() {
            rest = behind;
            parts.push(match char::from_u32(first) {
                Some('*') => Part::Any,
                Some('?') => Part::AnyOne,
                Some('[') => match class(behind) {
                    Some((class, behind)) => {
                        rest = behind;
                        class
                    }
                    None => Part::One(first),
                },
                Some('\\') => match behind.split_first() {
                    Some((&next, behind)) => {
                        rest = behind;
                        Part::One(next)
                    }
                    None => Part::One(first),
                },
                _ => Part::One(first),
            });
        }
        Glob { parts, ignores_case }
    }

    /// Whether all of a name is what the pattern stands for.
    pub fn matches(&self, name: &[u8]) -> bool {
        let name = characters(name, self.ignores_case);
        let (mut part, mut at) = (0, 0);
        // Where the last `*` is, and up to where it reaches: what comes later decides nothing about an earlier one.
        let mut star: Option<(usize, usize)> = None;
        while at < name.len() {
            match self.parts.get(part) {
                Some(Part::Any) => {
                    star = Some((part, at));
                    part += 1;
                    continue;
                }
                Some(one) if one.is(name[at]) => {
                    part += 1;
                    at += 1;
                    continue;
                }
                _ => {}
            }
            let Some((star_part, reach)) = star else { return false };
            star = Some((star_part, reach + 1));
            (part, at) = (star_part + 1, reach + 1);
        }
        self.parts[part..].iter().all(|part| *part == Part::Any)
    }
}

impl Part {
    fn is(&self, character: Character) -> bool {
        match self {
            Part::One(one) => *one == character,
            Part::AnyOne => true,
            Part::Any => false,
            Part::Class { excludes, ranges } => {
                let is_among = |&(first, last)| (first..=last).contains(&character);
                ranges.iter().any(is_among) != *excludes
            }
        }
    }
}

/// A class behind its bracket, and what is behind the class.
fn class(text: &[Character]) -> Option<(Part, &[Character])> {
    let is = |at: usize, wanted: char| text.get(at) == Some(&Character::from(wanted));
    let excludes = is(0, '!') || is(0, '^');
    let start = usize::from(excludes);
    let mut at = start;
    let mut ranges = Vec::new();
    // A bracket that comes first is one of the characters.
    while at == start || !is(at, ']') {
        let first = *text.get(at)?;
        if is(at + 1, '-') && !is(at + 2, ']') {
            ranges.push((first, *text.get(at + 2)?));
            at += 3;
        } else {
            ranges.push((first, first));
            at += 1;
        }
    }
    Some((Part::Class { excludes, ranges }, &text[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::new(pattern.as_bytes(), false).matches(name.as_bytes())
    }

    #[test]
    fn patterns_mean_what_they_mean_to_find() {
        for (pattern, name, is_match) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", ".hidden", true),
            ("*.txt", "a.txt", true),
            ("*.txt", "a.txt.gz", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("**a", "ba", true),
            ("?", "ä", true),
            ("?", "ab", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("[]]", "]", true),
            ("[a-]", "-", true),
            ("[a", "[a", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a\\", "a\\", true),
            ("*\n*", "a\nb", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern:?} {name:?}");
        }
        assert!(Glob::new(b"*.TXT", true).matches(b"a.txt"));
        assert!(Glob::new(b"?", false).matches(b"\xff"));
        assert!(!Glob::new(b"?", false).matches(b"\xff\xfe"));
        assert!(Glob::new(b"a\xff*", false).matches(b"a\xffb"));
        assert!(!Glob::new("ÿ".as_bytes(), false).matches(b"\xff"));
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "*a".repeat(50);
        assert!(!matches(&format!("{pattern}b"), &"a".repeat(255)));
    }
}
