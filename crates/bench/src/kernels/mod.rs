//! The computations of `bench compute`: three kernels like those of long-running programs whose
//! progress is worth saving.
//!
//! | kernel | matrices | one step of its performance-critical loop | changed in a step |
//! |---|---|---|---|
//! | `lu` | one of doubles, decomposed in place | one column is eliminated from all rows below | the whole rest of the matrix |
//! | `convolution` | input, filter, output of integers | one row of the output for each thread | these rows |
//! | `multiplication` | two factors and a product of integers | one tile of the inner dimension is added to the product | the whole product |
//!
//! A kernel works on memory provided by the caller, through raw pointers to the start of each
//! matrix. Each step is divided between the threads so that no two of them store to the same rows,
//! and steps are separated by barriers: see [`team`]. The loops over a row use slices, which lets
//! the compiler vectorise them; if the processor has AVX2, a version compiled for it is used.

mod convolution;
mod lu;
mod matrix;
mod multiplication;
pub mod team;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::rng::mix;

pub use matrix::Matrix;

/// The kernels of `bench compute`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelName {
    /// LU decomposition of a matrix of doubles
    Lu,
    /// Two-dimensional convolution of integers
    Convolution,
    /// Tiled multiplication of matrices of integers
    Multiplication,
}

impl KernelName {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Lu, Self::Convolution, Self::Multiplication];

    /// The name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lu => "lu",
            Self::Convolution => "convolution",
            Self::Multiplication => "multiplication",
        }
    }
}

/// How large the matrices of `bench compute` are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sizes {
    /// Some seconds for each kernel on two cores
    Default,
    /// LU 3584 × 3584 doubles, convolution 4096 × 128 integers, multiplication 3072 × 3072 integers
    Paper,
}

/// The size of a kernel's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scale {
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result.
    pub columns: usize,
    /// Width of the filter or of a tile; 0 if there is neither.
    pub width: usize,
}

impl Scale {
    /// The scale of a bench; `quick` is the form for tests.
    pub const fn of(kernel: KernelName, sizes: Sizes, quick: bool) -> Self {
        let (rows, columns, width) = match (kernel, sizes) {
            (KernelName::Lu, _) if quick => (160, 160, 0),
            (KernelName::Lu, Sizes::Default) => (2816, 2816, 0),
            (KernelName::Lu, Sizes::Paper) => (3584, 3584, 0),
            (KernelName::Convolution, _) if quick => (256, 128, 9),
            (KernelName::Convolution, Sizes::Default | Sizes::Paper) => (4096, 128, 127),
            (KernelName::Multiplication, _) if quick => (160, 160, 16),
            (KernelName::Multiplication, Sizes::Default) => (2560, 2560, 16),
            (KernelName::Multiplication, Sizes::Paper) => (3072, 3072, 16),
        };
        Self { rows, columns, width }
    }
}

/// One of the matrices of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Length in bytes.
    pub len_bytes: usize,
    /// Whether steps modify it, so that it must be made durable periodically.
    pub changes: bool,
}

/// A computation in steps.
pub trait Kernel: Sync {
    /// Its matrices. The last one is the result.
    fn matrices(&self) -> Vec<MatrixShape>;

    /// Fills the matrices with their input.
    ///
    /// # Safety
    /// `memory` must point to a writable, aligned range for each of [`Kernel::matrices`], and no
    /// other thread may access them.
    unsafe fn initialise(&self, memory: &[*mut u8]);

    /// Number of steps for this many threads.
    fn steps(&self, threads: usize) -> usize;

    /// Performs the share of thread `thread` of `threads` in step `step`.
    ///
    /// # Safety
    /// As for [`Kernel::initialise`], except for the other threads of the same step; each share must
    /// be done exactly once, by one thread, and all shares of a step before the next one begins.
    unsafe fn step(&self, memory: &[*mut u8], step: usize, thread: usize, threads: usize);
}

/// Finds a kernel.
pub fn find(name: KernelName, scale: Scale) -> Box<dyn Kernel> {
    match name {
        KernelName::Lu => Box::new(lu::Lu::new(scale)),
        KernelName::Convolution => Box::new(convolution::Convolution::new(scale)),
        KernelName::Multiplication => Box::new(multiplication::Multiplication::new(scale)),
    }
}

/// A number that depends on every 4 bytes of a result and on their positions.
///
/// # Safety
/// `memory` must point to `len_bytes` readable bytes, aligned to 4, that are not modified during
/// the call.
pub unsafe fn checksum(memory: *const u8, len_bytes: usize) -> u64 {
    // SAFETY: the caller's promise; any bytes are valid integers.
    let words = unsafe { std::slice::from_raw_parts(memory.cast::<u32>(), len_bytes / 4) };
    words.iter().zip(0_u64..).fold(0, |sum, (&word, index)| {
        sum.wrapping_add(mix(index).wrapping_mul(u64::from(word) + 1))
    })
}

/// Compiles a loop once for the baseline processor and once for AVX2, and calls the suitable
/// version.
macro_rules! vectorised {
    ($(#[$attribute:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block) => {
        $(#[$attribute])*
        #[inline]
        pub(super) fn $name($($argument: $kind),*) {
            #[inline(always)]
            fn portable($($argument: $kind),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn wide($($argument: $kind),*) {
                    portable($($argument),*);
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the feature the function is compiled for.
                    return unsafe { wide($($argument),*) };
                }
            }
            portable($($argument),*);
        }
    };
}
use vectorised;

/// A small pseudo-random integer for one position of an input matrix.
fn input(seed: u64, row: usize, column: usize) -> i32 {
    (mix(seed ^ mix((row as u64) << 32 | column as u64)) % 2001) as i32 - 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a kernel on `threads` threads and returns its matrices.
    pub fn run(kernel: &dyn Kernel, threads: usize) -> Vec<Vec<u64>> {
        let words = |shape: &MatrixShape| vec![0_u64; shape.len_bytes.div_ceil(8)];
        let mut matrices: Vec<Vec<u64>> = kernel.matrices().iter().map(words).collect();
        let memory: Vec<*mut u8> =
            matrices.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        // SAFETY: owned, aligned and long enough; there is no other thread.
        unsafe { kernel.initialise(&memory) };
        for step in 0..kernel.steps(threads) {
            for thread in 0..threads {
                // SAFETY: as above; the shares run one after the other.
                unsafe { kernel.step(&memory, step, thread, threads) };
            }
        }
        matrices
    }

    #[test]
    fn the_number_of_threads_does_not_change_results() {
        for name in KernelName::ALL {
            let kernel = find(name, Scale::of(name, Sizes::Default, true));
            let one = run(&*kernel, 1);
            for threads in [2, 3, 7] {
                assert!(run(&*kernel, threads) == one, "{} with {threads}", name.name());
            }
        }
    }

    #[test]
    fn checksums_depend_on_places() {
        let of = |words: &[u32]| {
            // SAFETY: a slice of that length.
            unsafe { checksum(words.as_ptr().cast(), words.len() * 4) }
        };
        assert_ne!(of(&[1, 2]), of(&[2, 1]));
        assert_ne!(of(&[0, 0]), of(&[0]));
    }
}
