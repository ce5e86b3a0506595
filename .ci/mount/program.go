// A program without the C library: files, mappings, locks and directories, by system calls of its own.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"syscall"
)

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// write makes files of a worker, and removes every third one while it is open.
func write(worker int) {
	directory := filepath.Join("workers", fmt.Sprint(worker))
	check(os.MkdirAll(directory, 0o750))
	for number := range 200 {
		path := filepath.Join(directory, fmt.Sprint(number))
		file := must(os.Create(path))
		must(file.Write(bytes.Repeat([]byte{byte(number)}, number*97)))
		if number%3 == 0 {
			check(os.Remove(path))
			must(file.WriteAt([]byte("removed"), 10))
		} else if number%3 == 1 {
			check(os.Rename(path, path+".renamed"))
		}
		check(file.Close())
	}
}

// count raises a counter in a shared mapping, under a lock.
func count(times int) {
	file := must(os.OpenFile("counter", os.O_RDWR|os.O_CREATE, 0o600))
	defer file.Close()
	check(file.Truncate(8192))
	page := must(syscall.Mmap(int(file.Fd()), 4096, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED))
	for range times {
		check(syscall.Flock(int(file.Fd()), syscall.LOCK_EX))
		for at := range page {
			page[at]++
			if page[at] != 0 {
				break
			}
		}
		check(syscall.Flock(int(file.Fd()), syscall.LOCK_UN))
	}
	check(syscall.Munmap(page))
}

func main() {
	var workers sync.WaitGroup
	for worker := range 4 {
		workers.Add(1)
		go func() {
			defer workers.Done()
			write(worker)
			count(1000)
		}()
	}
	workers.Wait()
	var lines []string
	check(filepath.Walk(".", func(path string, info os.FileInfo, err error) error {
		check(err)
		size := info.Size()
		if info.IsDir() {
			size = 0
		}
		lines = append(lines, fmt.Sprint(path, " ", info.Mode(), " ", size))
		return nil
	}))
	sort.Strings(lines)
	for _, line := range lines {
		fmt.Println(line)
	}
	fmt.Println(must(os.ReadFile("counter"))[4096:4100])
}
