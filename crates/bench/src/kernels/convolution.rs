//! Two-dimensional convolution of integers with a square filter; values outside the input are zero.
//!
//! A step computes one row of the output for each thread. Sums wrap, as in a program without
//! overflow checks.

use super::{Kernel, Matrix, MatrixShape, Scale, input, vectorised};

/// The kernel.
#[derive(Debug, Clone, Copy)]
pub struct Convolution {
    rows: usize,
    columns: usize,
    width: usize,
}

impl Convolution {
    /// An input and an output of this scale, and a filter of `scale.width` rows and columns.
    pub const fn new(scale: Scale) -> Self {
        Self { rows: scale.rows, columns: scale.columns, width: scale.width }
    }
}

impl Kernel for Convolution {
    fn matrices(&self) -> Vec<MatrixShape> {
        let input = MatrixShape { len_bytes: self.rows * self.columns * 4, changes: false };
        let filter = MatrixShape { len_bytes: self.width * self.width * 4, changes: false };
        vec![input, filter, MatrixShape { changes: true, ..input }]
    }

    unsafe fn initialise(&self, memory: &[*mut u8]) {
        let shapes = [(self.rows, self.columns), (self.width, self.width)];
        for ((&memory, (rows, columns)), seed) in memory.iter().zip(shapes).zip(2..) {
            let matrix = Matrix::<i32>::new(memory, columns);
            for row in 0..rows {
                // SAFETY: a row of the matrix, which only this call accesses.
                let values = unsafe { matrix.row_mut(row) };
                for (column, value) in values.iter_mut().enumerate() {
                    *value = input(seed, row, column);
                }
            }
        }
    }

    fn steps(&self, threads: usize) -> usize {
        self.rows.div_ceil(threads)
    }

    unsafe fn step(&self, memory: &[*mut u8], step: usize, thread: usize, threads: usize) {
        let row = step * threads + thread;
        if row >= self.rows {
            return;
        }
        let source = Matrix::<i32>::new(memory[0], self.columns);
        let filter = Matrix::<i32>::new(memory[1], self.width);
        let output = Matrix::<i32>::new(memory[2], self.columns);
        // SAFETY: in this step only this thread accesses this row.
        let sums = unsafe { output.row_mut(row) };
        sums.fill(0);
        let reach = self.width / 2;
        for filter_row in 0..self.width {
            let Some(source_row) = (row + filter_row).checked_sub(reach) else { continue };
            if source_row >= self.rows {
                break;
            }
            // SAFETY: no thread stores to the input.
            let values = unsafe { source.row(source_row) };
            // SAFETY: no thread stores to the filter.
            let weights = unsafe { filter.row(filter_row) };
            convolve_row(sums, values, weights);
        }
    }
}

vectorised! {
    /// Adds to each sum the values around it, weighted.
    fn convolve_row(sums: &mut [i32], values: &[i32], weights: &[i32]) {
        let (len, reach) = (sums.len(), weights.len() / 2);
        for (place, &weight) in weights.iter().enumerate() {
            // Column c adds weight * values[c + place - reach], if that is inside the row.
            let (first, skipped) = (reach.saturating_sub(place), place.saturating_sub(reach));
            if first >= len || skipped >= len {
                continue;
            }
            for (sum, value) in sums[first..].iter_mut().zip(&values[skipped..]) {
                *sum = sum.wrapping_add(weight.wrapping_mul(*value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::run;

    #[test]
    fn it_is_the_sum_of_weighted_neighbours() {
        for (rows, columns, width) in [(20, 13, 5), (6, 4, 9), (8, 8, 4)] {
            let kernel = Convolution::new(Scale { rows, columns, width });
            let matrices = run(&kernel, 3);
            let integers = |words: &[u64]| -> Vec<i32> {
                words.iter().flat_map(|&word| [word as i32, (word >> 32) as i32]).collect()
            };
            let output = integers(&matrices[2]);
            let reach = (width / 2) as isize;
            for row in 0..rows {
                for column in 0..columns {
                    let mut sum = 0_i32;
                    for down in 0..width {
                        for right in 0..width {
                            let from_row = row as isize + down as isize - reach;
                            let from_column = column as isize + right as isize - reach;
                            let inside = (0..rows as isize).contains(&from_row)
                                && (0..columns as isize).contains(&from_column);
                            if inside {
                                let value = input(2, from_row as usize, from_column as usize);
                                sum = sum.wrapping_add(value.wrapping_mul(input(3, down, right)));
                            }
                        }
                    }
                    assert_eq!(output[row * columns + column], sum, "{row}, {column}");
                }
            }
        }
    }
}
